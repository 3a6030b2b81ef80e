"""Simulation of what a plan holds and moves, without a byte: the ledger that the executor's must equal.

Does not model time, nor transfers that overlap what follows them: every copy takes its slots from its issue on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from patrickstar.core.ledger import Ledger
from patrickstar.core.machine import Tier
from patrickstar.core.trace import Trace
from patrickstar.plan.actions import Drop, Issue, Work, WorkKind
from patrickstar.plan.plan import Plan, frees_by_moment
from patrickstar.plan.residency import Residency, apply, mark_moment


@dataclass(frozen=True, slots=True)
class Simulation:
    """Sums of carrying out a plan, in bytes.

    Attributes:
        peak: by tier ("device", "host", "disk"; 0 where it is not used), the most held at once. Homes below the
            compute tier are reserved for every unit, with contents or not; copies on their way there come on top.
        moved: by link, such as "H>D".
        slots: slots of the compute tier in use during each moment; per_moment: their bytes and the moment's
            non-model bytes.
    """

    peak: Mapping[str, int]
    moved: Mapping[str, int]
    slots: tuple[int, ...]
    per_moment: tuple[int, ...]


def simulate(plan: Plan, trace: Trace) -> Simulation:
    """Carries a plan out on paper. InvariantError: the plan is not legal; `check` says all that is wrong with it."""
    state = Residency.of(plan.start)
    compute, slot_bytes = state.compute, state.slot_bytes
    ledger = Ledger()
    for tier in Tier:
        resting = state.slots_resting[tier] if tier is not compute else 0
        ledger.add(tier, (resting + state.slots_used.get(tier, 0)) * slot_bytes)
    freed_after = frees_by_moment(plan.frees)
    slots: list[int] = []
    per_moment: list[int] = []
    for index, (moment, actions) in enumerate(zip(trace.moments, plan.moments, strict=True)):
        for action in actions:
            apply(state, action)
            match action:
                case Issue(Work(WorkKind.COPY | WorkKind.CREATE, ref, tier), src):
                    if state.has_slots_to_take(ref, tier):
                        ledger.add(tier, state.unit_bytes(ref))
                    if src is not None:
                        ledger.move(src, tier, state.unit_bytes(ref))
                case Drop(ref, tier):
                    ledger.remove(tier, state.unit_bytes(ref))
        ledger.nonmodel(compute, moment.nonmodel_bytes)
        slots.append(state.slots_used[compute])
        per_moment.append(ledger.in_use(compute))
        mark_moment(state, moment, freed_after.get(index, ()))
    peak = {tier.label: ledger.peak[tier] for tier in Tier}
    # What is there before the first moment's evictions is the last plan's to answer for.
    peak[compute.label] = max(per_moment, default=0)
    return Simulation(peak, ledger.moved, tuple(slots), tuple(per_moment))
