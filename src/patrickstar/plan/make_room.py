"""Room for a moment: which units leave a tier and which come, as actions. Decides, and changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Touch
from patrickstar.plan.actions import Action
from patrickstar.plan.residency import Residency
from patrickstar.plan.staging import NoRoom, Order, Staging


def make_room(
    state: Residency,
    *,
    touches: Sequence[Touch] = (),
    held: Collection[PlaneRef] = (),
    leaving: Collection[PlaneRef] = (),
    capacity: Mapping[Tier, int],
    spare_slots: int = 0,
    order: Order,
) -> list[Action]:
    """Actions that bring what a moment touches to where it is touched, in at most as many slots as there are; changes nothing itself.

    Victims are taken in `order` from what is neither touched, held, nor at home on the tier that computes, also where nothing is missing but less
    room is left than is in use. Clean ones are dropped, dirty ones copied towards home first. Transfers of a kind are all issued before the
    first is waited for, so that they can overlap, and slots are given back before others are taken. Stale slots are given back first of all.
    What passes through the host on its way between device and disk stays there, until others need the room.

    Args:
        leaving: what goes from the tier that computes whether there is room or not, if nothing keeps it there.
        capacity: slots by tier: of the one that computes all that there are, of the host below a device those that are no homes.
        spare_slots: how many of the one that computes are to be free afterwards, if something has to leave and so much can.
    Raises:
        NoRoom: what is touched, held or at home takes more slots of a tier than there are.
    """
    compute, stale, slots = state.compute, state.stale, state.slots
    needed = dict.fromkeys(touch.ref for touch in touches if touch.tier in (None, compute))
    below = {touch.ref: touch.writes for touch in touches if touch.tier not in (None, compute)}
    landing = _landing(state, touches)
    missing = sorted(ref for ref in needed if not state.is_newest(ref, compute) and landing.get(ref) is not compute)
    keep = {**needed, **dict.fromkeys(held)}
    spent = sorted(ref for ref in stale[compute] if ref not in keep or ref in missing)
    in_use = state.slots_used[compute] + sum(slots[ref] for ref in missing) - sum(slots[ref] for ref in spent)
    most = capacity[compute]
    victims = _choose(state, keep=keep, leaving=leaving, in_use=in_use, most=most, spare=spare_slots, order=order)
    staging = Staging(state, host_slots=capacity.get(Tier.HOST, 0), order=order, wanted={*missing, *below})
    for ref in landing:
        staging.land(ref)
    staging.drop_stale(spent)
    for ref in victims:
        staging.evict(ref)
    for ref in missing:
        staging.fetch(ref)
    for ref, writes in below.items():
        staging.use_on_host(ref, writes=writes)
    return staging.actions()


def capacity_of(state: Residency, compute_slots: int, *, host_bytes: int) -> dict[Tier, int]:
    """Slots that copies may take, by tier: so many of the one that computes, and what homes leave of the host below a device."""
    if state.compute is Tier.HOST:
        return {Tier.HOST: compute_slots}
    return {state.compute: compute_slots, Tier.HOST: host_bytes // state.slot_bytes - state.slots_resting[Tier.HOST]}


def _landing(state: Residency, touches: Iterable[Touch]) -> dict[PlaneRef, Tier]:
    """Transfers that must be over first: those by which something comes, and those of what is written. By unit, where they go."""
    if not state.under_way:
        return {}
    return {
        touch.ref: flight[1]
        for touch in touches
        if (flight := state.flight(touch.ref))
        and (touch.writes or not state.is_newest(touch.ref, touch.tier or state.compute))
    }


def _choose(
    state: Residency,
    *,
    keep: Collection[PlaneRef],
    leaving: Collection[PlaneRef],
    in_use: int,
    most: int,
    spare: int,
    order: Order,
) -> list[PlaneRef]:
    """Units that leave anyway, and then the victims, in order, whose slots bring `in_use` down to `most`, and to so many less as are spare."""
    compute, home = state.compute, state.home
    taken, stale = state.taken[compute], state.stale[compute]

    def may_go(ref: PlaneRef) -> bool:
        return ref in taken and ref not in keep and home[ref] is not compute and ref not in stale

    gone = [ref for ref in leaving if may_go(ref)]
    in_use -= sum(state.slots[ref] for ref in gone)
    if in_use <= most:
        return gone
    candidates = order(compute, filter(may_go, taken))
    if state.under_way:  # what is still arriving goes last: somebody wanted it early
        candidates = sorted(candidates, key=lambda ref: state.is_arriving(ref, compute))
    victims: dict[PlaneRef, None] = {}
    wanted = most - spare
    for ref in candidates:
        if may_go(ref) and ref not in victims and ref not in gone:
            victims[ref] = None
            in_use -= state.slots[ref]
            if in_use <= wanted:
                break
    if in_use > most:
        raise NoRoom(compute, in_use, most)
    # A large unit that came last may have made smaller ones' going needless: the best of those stay.
    for ref in reversed(list(victims)):
        if in_use + state.slots[ref] <= wanted:
            in_use += state.slots[ref]
            del victims[ref]
    return [*gone, *victims]
