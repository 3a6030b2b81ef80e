"""The smallest budget of the compute tier with which a trace fits, and the moment that needs it.

What a moment touches, what is held from earlier ones, and what is at home on the compute tier must be there at once,
beside the moment's non-model bytes; everything else can be moved out of the way. So the worst moment decides, and
`make_plan` refuses exactly the budgets below it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from patrickstar.core.formats import Formats
from patrickstar.core.layout import Layout
from patrickstar.core.machine import Machine
from patrickstar.core.plane import PlaneRef
from patrickstar.core.trace import Moment, Trace
from patrickstar.plan.plan import frees_by_moment
from patrickstar.plan.refusal import refuse_moment
from patrickstar.plan.residency import Residency, bytes_of_slot, slots_of
from patrickstar.plan.snapshot import CopyState


@dataclass(frozen=True, slots=True)
class Need:
    """What one moment must hold at once on the compute tier. `moment`: as `Trace.name` prints it."""

    moment: str
    slots: int
    slot_bytes: int
    nonmodel_bytes: int

    @property
    def nbytes(self) -> int:
        """The budget that is just enough for it."""
        return self.slots * self.slot_bytes + self.nonmodel_bytes


def minimum_bytes(*traces: Trace, layout: Layout, formats: Formats) -> int:
    """The smallest budget of the compute tier with which all traces fit, when every unit's home is below it."""
    pinned = {ref for trace in traces for moment in trace.moments for ref in pinned_at(moment)}
    slots = {ref: slots_of(ref, layout, formats) for ref in pinned}
    slot_bytes = bytes_of_slot(layout, formats)
    needs = (
        _worst(trace, slots=slots, slot_bytes=slot_bytes, at_home=(), resident=set(), frees=()) for trace in traces
    )
    return max((need.nbytes for need in needs), default=0)


def worst_moment(trace: Trace, *, start: Residency, frees: Iterable[tuple[int, PlaneRef]] = ()) -> Need:
    """The moment that needs the largest budget; the earliest of equals.

    Args:
        start: where units are before the trace; what is at home on the compute tier stays there.
        frees: as for `make_plan`.
    """
    at_home = {ref for ref, tier in start.home.items() if tier is start.compute}
    resident = {ref for ref, copy in start.resident.items() if copy is CopyState.HERE and ref not in start.void}
    return _worst(
        trace, slots=start.slots, slot_bytes=start.slot_bytes, at_home=at_home, resident=resident, frees=frees
    )


def expect_room(need: Need, machine: Machine) -> None:
    """Raises BudgetError where the compute tier has less than this need, which is the largest there is."""
    budget_bytes = machine.budget[machine.compute]
    if need.nbytes > budget_bytes:
        fixed_bytes = machine.costs.beside(need.nbytes)
        raise refuse_moment(
            tier=machine.compute,
            moment=need.moment,
            slot_bytes=need.slot_bytes,
            slots=need.slots,
            nonmodel_bytes=need.nonmodel_bytes,
            fixed_bytes=fixed_bytes,
            budget_bytes=machine.given(machine.compute),
            smallest_bytes=need.nbytes + fixed_bytes,
        )


def _worst(
    trace: Trace,
    *,
    slots: Mapping[PlaneRef, int],
    slot_bytes: int,
    at_home: Collection[PlaneRef],
    resident: set[PlaneRef],
    frees: Iterable[tuple[int, PlaneRef]],
) -> Need:
    worst = Need("", 0, slot_bytes, 0)
    counts = _slots_needed(trace, slots=slots, at_home=at_home, resident=resident, frees=frees)
    for index, needed in enumerate(counts):
        nonmodel_bytes = trace.moments[index].nonmodel_bytes
        if not index or needed * slot_bytes + nonmodel_bytes > worst.nbytes:
            worst = Need(trace.name(index), needed, slot_bytes, nonmodel_bytes)
    return worst


def pinned_at(moment: Moment) -> list[PlaneRef]:
    """The units that must be resident at a moment and may not leave: touched, or held from earlier moments."""
    pinned = [touch.ref for touch in moment.touches]
    return [*pinned, *(ref for ref in moment.held if ref not in pinned)] if moment.held else pinned


def _slots_needed(
    trace: Trace,
    *,
    slots: Mapping[PlaneRef, int],
    at_home: Collection[PlaneRef],
    resident: set[PlaneRef],
    frees: Iterable[tuple[int, PlaneRef]],
) -> Iterator[int]:
    """Slots that each moment must hold at once. `resident`: what is at home on the compute tier, with contents."""
    freed_after = frees_by_moment(frees)
    at_rest = sum(slots[ref] for ref in resident)
    for index, moment in enumerate(trace.moments):
        passing = 0
        for ref in pinned_at(moment):
            if ref not in at_home:
                passing += slots[ref]
            elif ref not in resident:
                resident.add(ref)
                at_rest += slots[ref]
        yield at_rest + passing
        for ref in freed_after.get(index, ()):
            if ref in resident:
                resident.discard(ref)
                at_rest -= slots[ref]
