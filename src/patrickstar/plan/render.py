"""A plan as people read it: a line per moment, what moves before it, and why.

    plan 5d0c... by next-use: 300 moments, host budget 48.00 MiB, slots of 4.00 MiB
    peak host 47.25 MiB;  moved K>H 96.00 MiB, H>K 32.00 MiB
     0 forward   wte.weight     3 slots +   2.25 MiB   fetch c0.weight x3 K>H
    17 backward  h.3.mlp.w1     9 slots +  11.25 MiB   drop c3.weight (clean; next use at moment 93);  create c3.grad

Adjacent actions of one unit are told as one: fetched, written back and dropped, dropped, created.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from patrickstar.core.layout import Layout
from patrickstar.core.machine import LINKS, Machine, Tier
from patrickstar.core.planes import STEP, PlaneRef
from patrickstar.core.trace import Moment, Trace
from patrickstar.plan.actions import Action, Drop, Issue, WorkKind
from patrickstar.plan.eviction import NEVER, Uses
from patrickstar.plan.plan import Plan
from patrickstar.plan.simulate import Simulation, simulate
from patrickstar.units import format_bytes


def render(plan: Plan, trace: Trace, layout: Layout, machine: Machine, *, following: Trace | None = None) -> str:
    """The whole plan. `following`: the trace that `make_plan` was told comes next, for the reasons.

    Raises:
        StateError, InvariantError: as `simulate`.
    """
    simulation = simulate(plan, trace, layout, machine)
    uses = Uses(trace, following)
    width = max((len(moment.label) for moment in trace.moments), default=0)
    digits = len(str(max(len(trace) - 1, 0)))
    lines = list(_head(plan, machine, simulation))
    void_before: list[PlaneRef] = plan.start.void()
    freed_after = plan.freed_after()
    for index, (moment, actions) in enumerate(zip(trace.moments, plan.moments, strict=True)):
        told = ";  ".join(_told(actions, plan=plan, moment=moment, uses=uses, now=index, void=void_before))
        line = f"{index:>{digits}} {moment.phase.value:<9} {moment.label:<{width}} {simulation.slots[index]:>5} slots"
        lines.append(f"{line} + {format_bytes(moment.nonmodel_bytes):>10}   {told}".rstrip())
        void_before = freed_after.get(index, [])
    return "\n".join(lines)


def _head(plan: Plan, machine: Machine, simulation: Simulation) -> Iterator[str]:
    budgets = ", ".join(f"{tier.label} budget {format_bytes(nbytes)}" for tier, nbytes in machine.budget.items())
    yield (
        f"plan {plan.digest()} by {plan.policy}: {len(plan.moments)} moments, {budgets}, "
        f"slots of {format_bytes(plan.start.slot_bytes)}"
    )
    peaks = ", ".join(f"{tier.label} {format_bytes(simulation.peak[tier.label])}" for tier in machine.budget)
    moved = [f"{over} {format_bytes(simulation.moved[over])}" for over in LINKS if simulation.moved[over]]
    yield f"peak {peaks};  moved {', '.join(moved) or 'nothing'}"


def _told(
    actions: Collection[Action], *, plan: Plan, moment: Moment, uses: Uses, now: int, void: Collection[PlaneRef]
) -> Iterator[str]:
    """One phrase per unit and stay: its actions up to a `Drop` from the compute tier belong to the way out."""
    written = {touch.ref for touch in moment.touches if touch.writes}
    for ref, path in _journeys(actions):
        slots = plan.start.slots.get(ref, 1)
        unit = str(ref) if slots == 1 else f"{ref} x{slots}"
        begun = [step for step in path if isinstance(step, Issue)]
        links = "".join(f" {step.src.value}>{step.work.tier.value}" for step in begun if step.src)
        if ref.plane == STEP:
            yield from (f"update c{ref.chunk} on the {step.work.tier.label}" for step in begun)
        elif any(step.work.kind is WorkKind.CREATE for step in begun):
            yield f"create {unit} (zeros{'' if ref in written else ', only read'})"
        elif not _leaves(path, plan.start.compute):
            if any(step.src and step.work.tier is plan.start.compute for step in begun):
                yield f"fetch {unit}{links}"
            elif _leaves(path, Tier.HOST):
                yield f"write back {unit}{links} and drop it from the host" if links else f"drop {unit} from the host"
            else:
                yield f"bring {unit}{links}"
        elif ref in void:
            yield f"drop {unit} (its contents are no longer wanted)"
        elif links:
            yield f"write back {unit}{links} and drop it ({_reason(ref, plan.policy, uses, now)})"
        else:
            yield f"drop {unit} (clean; {_reason(ref, plan.policy, uses, now)})"


def _journeys(actions: Iterable[Action]) -> list[tuple[PlaneRef, list[Action]]]:
    """Actions by unit, in order of each one's first; a creation or a fetch after a drop is a journey of its own."""
    journeys: list[tuple[PlaneRef, list[Action]]] = []
    open_at: dict[PlaneRef, int] = {}
    for action in actions:
        is_begun = isinstance(action, Issue) and action.work.kind is WorkKind.CREATE
        if is_begun or action.of not in open_at:
            open_at[action.of] = len(journeys)
            journeys.append((action.of, []))
        journeys[open_at[action.of]][1].append(action)
    return journeys


def _leaves(path: Iterable[Action], tier: Tier) -> bool:
    return any(isinstance(step, Drop) and step.tier is tier for step in path)


def _reason(ref: PlaneRef, policy: str, uses: Uses, now: int) -> str:
    """The reason why the unit was chosen: what its policy looked at. A victim is not used at this moment."""
    if policy == "lru":
        last = uses.until(ref, now)
        if last == -NEVER:
            return "not used before"
        return f"last used at moment {last}" if last >= 0 else f"last used {-last} moments before this trace"
    upcoming = uses.after(ref, now)
    if upcoming == NEVER:
        return "never used again"
    if upcoming < uses.n_moments:
        return f"next use at moment {upcoming}"
    return f"next use {upcoming - uses.n_moments} moments into the next trace"
