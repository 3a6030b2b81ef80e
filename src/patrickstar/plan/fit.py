"""Fit of a trace: the smallest budget of the compute tier that is enough, the moment that needs it, and refusals of less.

What a moment touches, what is held from earlier ones, and what is at home on the compute tier must be there at once, beside the moment's non-model
bytes; everything else can be moved out of the way. So the worst moment decides, and `make_plan` refuses exactly the budgets below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from patrickstar.core.formats import Formats
from patrickstar.core.layout import Layout
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import GRAD, PlaneRef
from patrickstar.core.trace import Moment, Trace
from patrickstar.errors import BudgetError, some
from patrickstar.plan.plan import frees_by_moment
from patrickstar.plan.residency import Residency
from patrickstar.units import GIB, KIB, MIB, TIB, format_budget, hundredths

_UNITS = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B"))
_FITS, _OR = "\n  fits with: ", "  |  "


@dataclass(frozen=True, slots=True)
class Need:
    """Slots and bytes that one moment must hold at once on the compute tier. `moment`: as `Trace.name` prints it."""

    moment: str
    slots: int
    slot_bytes: int
    nonmodel_bytes: int

    @property
    def nbytes(self) -> int:
        """The budget in bytes that is just enough for the need."""
        return self.slots * self.slot_bytes + self.nonmodel_bytes


def minimum_bytes(*traces: Trace, layout: Layout, formats: Formats) -> int:
    """The smallest budget of the compute tier in bytes with which all traces fit, when every unit's home is below that tier."""
    pinned = {ref for trace in traces for moment in trace.moments for ref in pinned_at(moment)}
    start = Residency.at_rest(layout, compute=Tier.HOST, home=dict.fromkeys(pinned, Tier.DISK), formats=formats)
    return max((worst_moment(trace, start=start).nbytes for trace in traces), default=0)


def worst_moment(
    trace: Trace, *, start: Residency, frees: Iterable[tuple[int, PlaneRef]] = (), trained: bool = False
) -> Need:
    """The moment that needs the largest budget; the earliest of equals.

    Args:
        start: where units are before the trace; what is at home on the compute tier stays there.
        frees: as for `make_plan`.
        trained: whether a step is meant that comes after others: then all that is at home there has contents, but gradients have none.
    """
    has_contents = _once_trained if trained else lambda ref: not start.is_free(ref)
    counts = [*slots_needed(trace, start=start, has_contents=has_contents, frees=frees)]
    needed = [slots * start.slot_bytes + one.nonmodel_bytes for one, slots in counts]
    if not needed:
        return Need("", 0, start.slot_bytes, 0)
    worst = needed.index(max(needed))
    moment, slots = counts[worst]
    return Need(trace.name(worst), slots, start.slot_bytes, moment.nonmodel_bytes)


def beyond(trace: Trace, budget_bytes: int, *, start: Residency) -> list[Moment]:
    """The moments of a step, which comes after others, that need more than a budget."""
    counts = slots_needed(trace, start=start, has_contents=_once_trained)
    return [one for one, slots in counts if slots * start.slot_bytes + one.nonmodel_bytes > budget_bytes]


def within(trace: Trace, budget_bytes: int, *, start: Residency) -> Trace:
    """The trace of a step that has run in a budget, with no more non-model bytes at any moment than that leaves to later such steps."""
    moments = []
    for moment, slots in slots_needed(trace, start=start, has_contents=_once_trained):
        room = max(0, budget_bytes - slots * start.slot_bytes)
        nonmodel, live = min(moment.nonmodel_bytes, room), min(moment.live_bytes, room)
        moments.append(replace(moment, nonmodel_bytes=nonmodel, live_bytes=live))
    return Trace(tuple(moments))


def with_kept_bytes(trace: Trace, *, kept_bytes: int, budget_bytes: int, start: Residency) -> Trace:
    """The trace with what an allocator of a device keeps at every moment, as far as what a moment needs in slots leaves it.

    torch's allocator keeps what it has taken from the driver: what activations have had at some moment is not there for slots at another. Slots
    could only get it by emptying that cache, and the host would wait for the device twice a step.

    Args:
        kept_bytes: the most non-model bytes of any moment of any stretch. budget_bytes: of the compute tier.
        start: where units are; sizes and homes are what counts.
    """
    counts = slots_needed(trace, start=start)
    kept = ((one, min(kept_bytes, budget_bytes - slots * start.slot_bytes)) for one, slots in counts)
    return Trace(tuple(replace(one, nonmodel_bytes=max(one.nonmodel_bytes, nbytes)) for one, nbytes in kept))


def expect_room(need: Need, machine: Machine) -> None:
    """Raises BudgetError where the compute tier has less than `need`, which is the largest there is."""
    compute = machine.compute
    if need.nbytes > machine.budget[compute]:
        fixed_bytes = machine.costs.beside(need.nbytes)
        raise refuse_moment(need, tier=compute, budget_bytes=machine.given(compute), fixed_bytes=fixed_bytes)


def pinned_at(moment: Moment) -> list[PlaneRef]:
    """The units that must be on the tier that computes at a moment and may not leave it: touched there, or held from earlier moments."""
    pinned = [touch.ref for touch in moment.touches if touch.tier is None]
    return [*dict.fromkeys((*pinned, *moment.held))] if moment.held else pinned


def _once_trained(ref: PlaneRef) -> bool:
    """Tells whether a unit that is at home on the compute tier has contents between steps."""
    return ref.plane != GRAD


def slots_needed(
    trace: Trace,
    *,
    start: Residency,
    has_contents: Callable[[PlaneRef], bool] = lambda _: True,
    frees: Iterable[tuple[int, PlaneRef]] = (),
) -> Iterator[tuple[Moment, int]]:
    """Each moment, and the slots that it must hold at once. `has_contents`: asked of what is at home on the compute tier; as for `worst_moment`."""
    freed_after, slots, at_home = frees_by_moment(frees), start.slots, start.at_home()
    resident = set(filter(has_contents, at_home))
    at_rest = sum(slots[ref] for ref in resident)
    for index, moment in enumerate(trace.moments):
        passing = 0
        for ref in pinned_at(moment):
            if ref not in at_home:
                passing += slots[ref]
            elif ref not in resident:
                resident.add(ref)
                at_rest += slots[ref]
        yield moment, at_rest + passing
        for ref in freed_after.get(index, ()):
            if ref in resident:
                resident.discard(ref)
                at_rest -= slots[ref]


def refuse_moment(need: Need, *, tier: Tier, budget_bytes: int, fixed_bytes: int = 0, instead: str = "") -> BudgetError:
    """An error for a moment that needs more of a tier than its budget. `fixed_bytes`: what that holds beside; `instead`: what else would help."""
    chunks = need.slots * need.slot_bytes
    words = f"chunk slots {{}} ({need.slots} of {format_budget(need.slot_bytes)})"
    room = budget_bytes - chunks - fixed_bytes
    if room > 0 and not instead:
        size = _Sizes(chunks + need.nonmodel_bytes + fixed_bytes).down(room)
        instead = f"activations of at most {size} there: a smaller batch, or activation checkpointing"
    return refuse_parts(
        tier,
        f"at op {need.moment}",
        {words: chunks, "activations {}": need.nonmodel_bytes},
        budget_bytes=budget_bytes,
        fixed_bytes=fixed_bytes,
        instead=instead,
        moment=need.moment,
    )


def refuse_host(needed_slots: int, moment: str, *, state: Residency, host_bytes: int) -> BudgetError:
    """An error for a moment that needs so many slots at once of the host below a device, beside homes."""
    need = Need(moment, needed_slots + state.slots_resting[Tier.HOST], state.slot_bytes, 0)
    return refuse_moment(need, tier=Tier.HOST, budget_bytes=host_bytes)


def refuse_homes(
    *, tier: Tier, parts: dict[str, int], budget_bytes: int, instead: str = "", why: str = "", fixed_bytes: int = 0
) -> BudgetError:
    """An error for what rests on a tier and takes more than the tier's budget.

    Args:
        parts: what rests there, and its bytes; instead: another change that would help; why: what is to rest there as well.
        fixed_bytes: what a budget for that much holds beside it.
    """
    at = f"for the model states kept there{f': {why}' if why else ''}"
    named = {f"{name} {{}}": nbytes for name, nbytes in parts.items()}
    return refuse_parts(tier, at, named, budget_bytes=budget_bytes, fixed_bytes=fixed_bytes, instead=instead)


def refuse_parts(
    tier: Tier, at: str, parts: dict[str, int], *, budget_bytes: int, fixed_bytes: int, instead: str, moment: str = ""
) -> BudgetError:
    """An error for what takes more of a tier than its budget: the bytes of each part, by the words around them."""
    named = {**parts, "fixed costs {}": fixed_bytes} if fixed_bytes else parts
    needed = sum(named.values())
    size = _Sizes(needed)
    total, *terms = size.sum_of(list(named.values()))
    summed = " + ".join(words.format(term) for words, term in zip(named, terms, strict=True))
    fits = [_budget(tier.label, needed), *filter(None, [instead])]
    return BudgetError(
        f"{tier.label} memory is {size.short(needed, budget_bytes)} short {at}\n"
        f"  needed {total} = {summed};  budget {size.down(budget_bytes)}{_FITS}{_OR.join(fits)}",
        tier=tier.label,
        moment=moment,
        needed_bytes=needed,
        available_bytes=budget_bytes,
        smallest_bytes=needed,
        fixed_bytes=fixed_bytes,
    )


def advise(refusal: BudgetError, enough: Mapping[str, int], *, more: str = "") -> BudgetError:
    """The refusal with budgets that are enough together, by tier, in the place of the one that it names for its own problem.

    Args:
        more: to be said after all.
    """
    problem, _, advice = str(refusal).partition(_FITS)
    instead = advice.split(_OR)[1 if refusal.smallest_bytes else 0 :] if advice else []
    fits = [" and ".join(_budget(tier, nbytes) for tier, nbytes in enough.items()), *instead]
    told = {**vars(refusal), "smallest_bytes": enough[refusal.tier]}
    return BudgetError(f"{problem}{_FITS}{_OR.join(fits)}{more}", **told)


def of_machine(refusal: BudgetError, enough: int, ranks: int, *, staging_bytes: int = 0) -> BudgetError:
    """The refusal with the budget of a host or a disk that so many ranks share, of which each needs `enough`, and for staging on the host."""
    if refusal.tier == Tier.DEVICE.label or not enough:
        return refusal
    more = f"\n  of which each of {ranks} ranks has its part; the other numbers are those of one rank"
    if refusal.tier == Tier.HOST.label:
        enough += staging_bytes
    return advise(refusal, {refusal.tier: ranks * enough}, more=more)


def _budget(tier: str, nbytes: int) -> str:
    return f"{tier}_memory >= {format_budget(nbytes)}"


def name_gradients(trace: Trace) -> str:
    """A phrase for the gradients that a trace shows in their plane, which is why they need room: for `refuse_homes`."""
    names = list(dict.fromkeys(m.label for m in trace.moments if any(touch.ref.plane == GRAD for touch in m.touches)))
    return f"gradients that cannot be used as they arrive ({some(names, most=3)})"


class _Sizes:
    """Sizes of one message, all in the unit of the largest and in whole hundredths of it, so that they add up.

    A need is rounded up as a whole, and budgets down: nothing that is printed as fitting is short by a rounding.
    """

    def __init__(self, largest: int) -> None:
        self._nbytes, self._name = next((unit for unit in _UNITS if largest >= unit[0]), _UNITS[-1])

    def down(self, nbytes: int) -> str:
        return self._text(self._floor(nbytes))

    def sum_of(self, parts: list[int]) -> list[str]:
        """The sum of the parts, and the parts, each so that the first of them add up."""
        sums = [hundredths(nbytes, self._nbytes) for nbytes in accumulate(parts, initial=0)]
        return [self._text(grains) for grains in (sums[-1], *(after - before for before, after in pairwise(sums)))]

    def short(self, needed: int, budget_bytes: int) -> str:
        return self._text(hundredths(needed, self._nbytes) - self._floor(budget_bytes))

    def _floor(self, nbytes: int) -> int:
        return nbytes * 100 // self._nbytes

    def _text(self, found: int) -> str:
        return f"{found // 100} B" if self._nbytes == 1 else f"{found / 100:.2f} {self._name}"
