"""Room for a moment: which units leave a tier and which come, as actions. Decides, and changes nothing.

The moves of one decision go leg by leg: between neighbours directly, and between device and disk through the host. They go in rounds. In each,
transfers of a kind are all issued before the first is waited for; a round ends where the host has no room for more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Touch
from patrickstar.plan.actions import Action, Drop, Issue, Wait
from patrickstar.plan.residency import Residency

Order = Callable[[Tier, Iterable[PlaneRef]], Iterable[PlaneRef]]
"""Orders candidates for leaving a tier, best first. It may offer others as well: those are passed over."""

# The parts of a round, in order: waits for what was under way, what leaves the host, what leaves the tier that computes, what comes there.
_LANDS, _HOST, _HOST_ENDS, _OUT, _OUT_ENDS, _INTO, _ONWARD, _INTO_ENDS = range(8)


class NoRoom(Exception):  # noqa: N818 - not an error yet: planner and pilot turn it into a BudgetError with names
    """A lack of slots: what a moment needs at once on a tier, and may not lose, takes more than there are."""

    def __init__(self, tier: Tier, needed_slots: int, capacity_slots: int) -> None:
        super().__init__(
            f"{needed_slots} slots of the {tier.label} are needed at once, and there is room for {max(capacity_slots, 0)}"
        )
        self.tier = tier
        self.needed_slots = needed_slots
        self.capacity_slots = capacity_slots


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
    # Transfers that must be over first: those by which something comes, and those of what is written. By unit, where they go.
    landing = {
        ref: flight[1]
        for ref, writes, tier in touches
        if ref in state.under_way
        and (flight := state.flight(ref))
        and (writes or not state.is_newest(ref, tier or compute))
    }
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


class Staging:
    """Collects moves, and knows what each leaves on the host.

    Args:
        host_slots: of the host below a device, beside homes. wanted: units that something is about to read on the host: they go last.
    """

    def __init__(self, state: Residency, *, host_slots: int, order: Order, wanted: Collection[PlaneRef]) -> None:
        self._state = state
        self._host_slots = host_slots
        self._order = order
        self._wanted = wanted

        self._host_free = host_slots - state.slots_used[Tier.HOST] if state.compute is Tier.DEVICE else 0
        self._came: dict[PlaneRef, None] = {}  # to the host, in rounds that are over
        self._left: set[PlaneRef] = set()
        self._gone: set[PlaneRef] = set()  # from the tier that computes
        self._landed: set[PlaneRef] = set()  # what was under way, and is waited for
        self._used: set[PlaneRef] = set()  # on the host, by what comes next
        self._actions: list[Action] = []
        self._round: list[list[Action]] = [[] for _ in range(8)]  # by part
        self._entered: list[PlaneRef] = []  # the host, in this round
        self._read: set[PlaneRef] = set()  # from there, in this round

    def actions(self) -> list[Action]:
        """All that has been collected, in order."""
        self._end_round()
        return self._actions

    def land(self, ref: PlaneRef) -> None:
        """Has a transfer under way waited for, before what else is done in this round."""
        if ref not in self._landed:
            self._landed.add(ref)
            flight = self._state.flight(ref)
            assert flight is not None, f"{ref} is not on its way"
            self._round[_LANDS].append(Wait.copy(ref, flight[1]))

    def drop_stale(self, refs: Iterable[PlaneRef]) -> None:
        """Gives slots of these on the tier that computes back, and all of the host's that nobody wants."""
        state = self._state
        self._actions += [Drop(ref, state.compute, state.slots[ref]) for ref in refs]
        self._gone.update(refs)
        if state.compute is Tier.DEVICE and state.stale[Tier.HOST]:
            stale = sorted(state.stale[Tier.HOST])
            self._actions += [Drop(ref, Tier.HOST, state.slots[ref]) for ref in stale]
            self._host_free += sum(state.slots[ref] for ref in stale)
        self._make_host_room(0)  # homes may have come since

    def evict(self, ref: PlaneRef) -> None:
        """Takes a unit off the tier that computes."""
        state, compute = self._state, self._state.compute
        self._gone.add(ref)
        if state.under_way and compute in (state.flight(ref) or ()):
            self.land(ref)
        elif state.is_dirty(ref, compute):
            self._take_down(ref)
        self._round[_OUT_ENDS].append(Drop(ref, compute, state.slots[ref]))

    def _take_down(self, ref: PlaneRef) -> None:
        """Copies what only the tier that computes has to the next one."""
        compute = self._state.compute
        self._enter_host(ref)
        down = Issue.copy(ref, compute, compute.below, self._state.slots[ref])
        self._round[_OUT].append(down)
        self._round[_OUT_ENDS].append(Wait(down.work))

    def fetch(self, ref: PlaneRef) -> None:
        """Brings a unit to the tier that computes: with its contents, or full of zeros where it has none."""
        state = self._state
        compute, slots = state.compute, state.slots[ref]
        if state.is_free(ref):
            self._round[_INTO].append(Issue.create(ref, compute, slots))
            return
        if compute is Tier.HOST or self._is_on_host(ref):
            self._round[_INTO].append(Issue.copy(ref, compute.below, compute, slots))
            self._read.add(ref)
        else:
            self._enter_host(ref)
            self._round[_INTO].append(Issue.copy(ref, Tier.DISK, Tier.HOST, slots))
            self._round[_ONWARD] += [Wait.copy(ref, Tier.HOST), Issue.copy(ref, Tier.HOST, compute, slots)]
        self._round[_INTO_ENDS].append(Wait.copy(ref, compute))

    def use_on_host(self, ref: PlaneRef, *, writes: bool) -> None:
        """Brings a unit to the host, below a device; where it is written there, it leaves the device."""
        state = self._state
        device, slots = state.compute, state.slots[ref]
        self._end_round()
        is_here = ref in state.taken[device] and ref not in self._gone
        if not self._is_on_host(ref):
            if is_here and state.is_newest(ref, device):
                self._take_down(ref)
            else:
                self._enter_host(ref)
                if state.is_free(ref):
                    self._round[_INTO].append(Issue.create(ref, Tier.HOST, slots))
                else:
                    self._round[_INTO] += [Issue.copy(ref, Tier.DISK, Tier.HOST, slots), Wait.copy(ref, Tier.HOST)]
        self._used.add(ref)
        if is_here and writes:
            self._round[_OUT_ENDS].append(Drop(ref, device, slots))
            self._gone.add(ref)

    def _is_on_host(self, ref: PlaneRef) -> bool:
        """Tells whether the host will hold a unit's last contents, once the rounds that are over have been done."""
        if ref in self._left:
            return False
        return ref in self._came or self._state.is_newest(ref, Tier.HOST) or self._state.is_arriving(ref, Tier.HOST)

    def _enter_host(self, ref: PlaneRef) -> None:
        """Has room for a unit on the host below a device, in this round or a later one."""
        state = self._state
        if state.compute is Tier.HOST:  # what leaves goes to the disk
            return
        if state.home[ref] is not Tier.HOST:
            self._make_host_room(state.slots[ref])
            self._host_free -= state.slots[ref]
        self._entered.append(ref)

    def _make_host_room(self, slots: int) -> None:
        while self._host_free < slots:
            victim = next(self._host_victims(), None)
            if victim is not None:
                self._leave_host(victim)
            elif self._entered or self._read:
                self._end_round()
            else:
                raise NoRoom(Tier.HOST, self._host_slots - self._host_free + slots, self._host_slots)

    def _host_victims(self) -> Iterator[PlaneRef]:
        """Units that may leave the host now, best first: those for which the device has just got a copy, and those that are wanted there last."""
        state = self._state
        stays = {*self._left, *self._used, *self._entered, *self._read}
        below = [ref for ref in self._came if ref not in stays and state.home[ref] is Tier.DISK]
        yield from (ref for ref in below if not state.is_dirty(ref, state.compute))
        taken, stale = state.taken[Tier.HOST], state.stale[Tier.HOST]
        cached = [
            ref
            for ref in self._order(Tier.HOST, taken)
            if ref in taken and ref not in stale and ref not in stays and ref not in self._came
        ]
        yield from sorted(cached, key=lambda ref: (state.flight(ref) is not None, ref in self._wanted))
        yield from (ref for ref in below if state.is_dirty(ref, state.compute))

    def _leave_host(self, ref: PlaneRef) -> None:
        state = self._state
        slots, flight = state.slots[ref], state.flight(ref)
        self._left.add(ref)
        self._host_free += slots
        if flight:
            self.land(ref)
        if not state.is_newest(ref, Tier.DISK) and flight != (Tier.HOST, Tier.DISK):
            self._round[_HOST].append(Issue.copy(ref, Tier.HOST, Tier.DISK, slots))
            self._round[_HOST_ENDS].append(Wait.copy(ref, Tier.DISK))
        self._round[_HOST_ENDS].append(Drop(ref, Tier.HOST, slots))

    def _end_round(self) -> None:
        for part in self._round:
            self._actions += part
            part.clear()
        self._came.update(dict.fromkeys(self._entered))
        self._left.difference_update(self._entered)
        self._entered, self._read = [], set()
