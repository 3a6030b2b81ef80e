"""Making a plan from a trace. At each moment: make room, carry that out on the state, note what the moment did.

    for each moment:  make_room ──> actions ──> apply ──> mark_written, mark_free
                          ^
                  eviction order: a policy over the uses still to come

One pass, with an eviction order kept sorted as units are used: close to linear in moments plus actions.
"""

from __future__ import annotations

from collections.abc import Iterable

from patrickstar.core.layout import Layout
from patrickstar.core.machine import Machine
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Moment, Trace
from patrickstar.plan.actions import Action, Drop
from patrickstar.plan.eviction import Ranking, Uses, policy_named
from patrickstar.plan.fit import expect_room, pinned_at, worst_moment
from patrickstar.plan.placement import refuse_unless_homes_fit
from patrickstar.plan.plan import Plan, frees_by_moment
from patrickstar.plan.residency import Residency, apply, mark_free, mark_written
from patrickstar.plan.room import Order, make_room
from patrickstar.plan.rows import prepare_rows, state_after


def make_plan(
    trace: Trace,
    *,
    layout: Layout,
    machine: Machine,
    start: Residency,
    policy: str = "next-use",
    following: Trace | None = None,
    frees: Iterable[tuple[int, PlaneRef]] = (),
) -> Plan:
    """The plan for one stretch: a forward and backward, or one optimizer step.

    Args:
        start: where every unit is now; not changed.
        following: the stretch expected next, after which this one is expected again. None: this one at once.
        frees: (moment, unit): what nobody wants any more once that moment is over.
    Raises:
        BudgetError: some moment needs more of the compute tier than its budget, or homes do not fit the tiers below;
            the message names the moment that needs most.
        ConfigError: there is no such policy.
    """
    state = start.copy()
    freed = tuple(sorted(frees))
    refuse_unless_homes_fit(machine, home=state.home, slots=state.slots, slot_bytes=state.slot_bytes)
    expect_room(worst_moment(trace, start=state, frees=freed), machine)
    worth = policy_named(policy)(Uses(trace, following))
    ranking = Ranking(state, worth=worth)
    freed_after = frees_by_moment(freed)
    before = state.snapshot()
    budget_bytes, slot_bytes = machine.budget[machine.compute], state.slot_bytes
    moments: list[tuple[Action, ...]] = []
    for index, moment in enumerate(trace.moments):
        capacity_slots = (budget_bytes - moment.nonmodel_bytes) // slot_bytes
        actions = _before(state, moment, capacity_slots=capacity_slots, order=ranking)
        for action in actions:
            apply(state, action)
            if isinstance(action, Drop) and action.tier is state.compute:
                ranking.gone(action.ref)
        for touch in moment.touches:
            if touch.writes:
                mark_written(state, touch.ref)
            ranking.used(touch.ref, index)
        for ref in moment.held:
            if ref not in ranking:
                ranking.used(ref, index)
        for ref in freed_after.get(index, ()):
            mark_free(state, ref)
            ranking.gone(ref)
        moments.append(tuple(actions))
    return Plan(layout.digest(), policy, machine, before, tuple(moments), state.snapshot(), freed)


def _before(state: Residency, moment: Moment, *, capacity_slots: int, order: Order) -> list[Action]:
    """Actions that must happen before the moment."""
    pinned = pinned_at(moment)
    actions: list[Action] = []
    if state.void or state.slots_used > capacity_slots or not all(ref in state.resident for ref in pinned):
        actions = make_room(state, needed=pinned, capacity_slots=capacity_slots, order=order)
    if moment.rows is not None:
        actions += prepare_rows(state_after(state, actions), moment.rows)
    return actions
