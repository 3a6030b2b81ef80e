"""Room for a moment: which units leave the compute tier and which come, as actions. Decides, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.plan.actions import Action, Copy, Create, Drop, Wait
from patrickstar.plan.residency import CLEAN, HERE, Residency

__all__ = ["NoRoom", "Order", "make_room"]

Order = Callable[[Iterable[PlaneRef]], Iterable[PlaneRef]]
"""Orders candidates for eviction, best first. It may offer others as well: those are passed over."""


class NoRoom(Exception):  # noqa: N818 - not an error yet: planner and pilot turn it into a BudgetError with names
    """A lack of slots: what a moment needs at once, and may not lose, takes more than there are."""

    def __init__(self, needed_slots: int, capacity_slots: int) -> None:
        super().__init__(f"{needed_slots} slots are needed at once, and there is room for {max(capacity_slots, 0)}")
        self.needed_slots = needed_slots
        self.capacity_slots = capacity_slots


def make_room(
    state: Residency,
    *,
    needed: Iterable[PlaneRef],
    pinned: Collection[PlaneRef] = (),
    capacity_slots: int,
    order: Order,
) -> list[Action]:
    """Actions that make every unit of `needed` resident in at most `capacity_slots` slots; changes nothing itself.

    Victims are taken in `order` from what is neither needed, pinned, nor at home here, also where nothing is missing
    but less room is left than is in use. Clean ones are dropped, dirty ones copied home first. Transfers of a kind are
    all issued before the first is waited for, so that they can overlap, and slots are given back before others are
    taken. Void units give theirs back first of all.

    Raises:
        NoRoom: what is needed, pinned or at home here takes more slots than that.
    """
    state.expect_settled()
    resident, slots = state.resident, state.slots
    keep = dict.fromkeys(needed)
    missing = sorted(ref for ref in keep if ref not in resident or ref in state.void)
    keep.update(dict.fromkeys(pinned))
    voids = sorted(ref for ref in state.void if ref not in keep or ref in missing)
    in_use = state.slots_used - sum(slots[ref] for ref in voids) + sum(slots[ref] for ref in missing)
    victims = _choose(state, keep=keep, in_use=in_use, capacity_slots=capacity_slots, order=order)
    actions: list[Action] = [Drop(ref, state.compute, slots[ref]) for ref in voids]
    return actions + _evictions(state, victims) + _arrivals(state, missing)


def _choose(
    state: Residency, *, keep: Collection[PlaneRef], in_use: int, capacity_slots: int, order: Order
) -> list[PlaneRef]:
    """The victims, in order, whose slots bring `in_use` down to the capacity."""
    if in_use <= capacity_slots:
        return []

    def may_go(ref: PlaneRef) -> bool:
        return ref not in keep and state.resident.get(ref, HERE) is not HERE and ref not in state.void

    victims: dict[PlaneRef, None] = {}
    for ref in order(filter(may_go, state.resident)):
        if may_go(ref) and ref not in victims:
            victims[ref] = None
            in_use -= state.slots[ref]
            if in_use <= capacity_slots:
                break
    else:
        raise NoRoom(in_use, capacity_slots)
    # A large unit that came last may have made smaller ones' going needless: the best of those stay.
    for ref in reversed(list(victims)):
        if in_use + state.slots[ref] <= capacity_slots:
            in_use += state.slots[ref]
            del victims[ref]
    return list(victims)


def _evictions(state: Residency, victims: list[PlaneRef]) -> list[Action]:
    compute, issues, ends = state.compute, list[Action](), list[Action]()
    for ref in victims:
        home, slots = state.home[ref], state.slots[ref]
        if state.resident[ref] is CLEAN:
            ends.append(Drop(ref, compute, slots))
        elif state.stages(ref):
            ends += [Copy(ref, compute, Tier.HOST, slots), Wait(ref, Tier.HOST), Drop(ref, compute, slots)]
            ends += [Copy(ref, Tier.HOST, home, slots), Wait(ref, home), Drop(ref, Tier.HOST, slots)]
        else:
            issues.append(Copy(ref, compute, home, slots))
            ends += [Wait(ref, home), Drop(ref, compute, slots)]
    return issues + ends


def _arrivals(state: Residency, missing: list[PlaneRef]) -> list[Action]:
    compute, issues, ends = state.compute, list[Action](), list[Action]()
    for ref in missing:
        home, slots = state.home[ref], state.slots[ref]
        if ref in state.free:
            issues.append(Create(ref, compute, slots))
        elif state.stages(ref):
            ends += [Copy(ref, home, Tier.HOST, slots), Wait(ref, Tier.HOST)]
            ends += [Copy(ref, Tier.HOST, compute, slots), Wait(ref, compute), Drop(ref, Tier.HOST, slots)]
        else:
            issues.append(Copy(ref, home, compute, slots))
            ends.append(Wait(ref, compute))
    return issues + ends
