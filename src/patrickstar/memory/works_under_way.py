"""Works under way: the lane that does each, its ticket, and what it comes after.

Each work comes after those that it depends on, by the table of `plan/actions.py`: what is written comes after the fences of its slots, and after
what still uses them, what is read after what writes it. What is created has no wait: whoever uses it first waits for its zeros.

A device's transfer counts as arrived once it is queued, and slots are given back while kernels that read them are queued: who comes next has the
device wait (`Readiness`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from random import Random
from typing import Final

import torch

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Touch
from patrickstar.memory.device_failure import DeviceFailureError
from patrickstar.memory.lanes import DONE, InlineLane, Lane, PacedLane, StressedLane, Task, ThreadLane, Ticket
from patrickstar.memory.stream_lane import StreamLane, StreamTicket
from patrickstar.memory.unit_bytes import UnitBytes
from patrickstar.plan import residency
from patrickstar.plan.actions import Issue, Work, WorkKind, reads, writes

Place = tuple[PlaneRef, Tier]
"""A unit's bytes on one tier."""

MakeLane = Callable[[Tier, Tier | None], Lane]
"""Makes the lane from one tier to another; from a tier to itself: that which fills slots there; from a tier to none: that which updates there."""

DISK_REQUESTS: Final = 2
"""Under way in each direction at once (`benchmarks/disk.py --depth`): one leaves many disks idle between two, four are no faster than two."""

_STRESSED_WORKS: Final = 3  # at once, so that they overtake each other


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A work that has been issued. `during`: the moment of that; `fresh_slots`: slots of the compute tier whose pages come with it."""

    ticket: Ticket
    during: str
    fresh_slots: int


@dataclass(eq=False)
class WorksUnderWay:
    """Has works done, in an order in which none is early.

    Attributes:
        units: whose bytes they move.
        make_lane: makes the lanes, each when it is first used. chunks: number of chunks of a unit's run.
        device: whose streams the lanes of links and of the compute tier are; None: there are none. poison: whether slots given back are
            filled with NaN. is_queued: whether works are queued on a device, and so `compute` is to be called.
    """

    units: UnitBytes
    make_lane: MakeLane
    _: KW_ONLY
    chunks: Callable[[PlaneRef], int]
    device: torch.device | None = None
    poison: bool = False

    def __post_init__(self) -> None:
        self._state, self._compute = self.units.state, self.units.state.compute
        self._readiness = Readiness(self.device)
        self.is_queued = self.device is not None
        self._lanes: dict[tuple[Tier, Tier | None], Lane] = {}
        self._under_way: dict[tuple[WorkKind, PlaneRef, Tier], _UnderWay] = {}  # by work

    # lanes

    def lane(self, src: Tier, dst: Tier | None) -> Lane:
        """The lane from one tier to another, the one that fills slots of a tier, or the one that updates what is there."""
        found = self._lanes.get((src, dst))
        if found is None:
            found = self._lanes[src, dst] = self.make_lane(src, dst)
        return found

    def drain(self) -> None:
        """Waits until nothing is under way."""
        for lane in self._lanes.values():
            lane.drain()

    def close(self) -> None:
        """Ends all lanes, when nothing is under way any more, and nothing that a device has queued uses a slot."""
        self.drain()  # of all, first: works of one may come after those of another
        for lane in self._lanes.values():
            lane.close()
        with suppress(DeviceFailureError):  # nothing runs on a device that has failed
            for ticket in self._readiness.computed():
                ticket.wait()

    # what begins

    def begin(self, issue: Issue, task: Task, *, during: str, fresh_slots: int, takes: bool) -> None:
        """Has a work begin on its lane, after what it has to come after.

        Args:
            during: the moment, for a message. fresh_slots: slots of the compute tier whose pages come with it.
            takes: whether it writes into slots that have just been taken.
        """
        (kind, ref, tier), src = issue.work, issue.src
        before = self._before_writing(issue, takes=takes)
        if src is not None and ref in self._state.under_way and len(self._state.updates_of(ref)) > 1:
            ticket = self._begin_by_chunk(ref, src, tier, before)
        else:
            lane = self.lane(src or tier, None if kind is WorkKind.UPDATE else tier)
            nbytes = 0 if src is None else issue.slots * self._state.slot_bytes
            ticket = lane.issue(task, [*before, *self._before_reading(issue)], nbytes=nbytes)
        self._under_way[issue.work] = _UnderWay(ticket, during, fresh_slots)
        if self.is_queued:
            self._note_places(issue, ticket)

    def _note_places(self, issue: Issue, ticket: Ticket) -> None:
        kind, _, tier = issue.work
        for place in reads(issue, self._state.home):
            self._readiness.read(place[:2], ticket)
        for place in writes(issue, self._state.home):
            self._readiness.written(place[:2], ticket)
        if kind is WorkKind.CREATE and tier is self._compute:
            del self._under_way[issue.work]  # nobody waits for it on the host

    def _before_reading(self, issue: Issue) -> list[Ticket]:
        """All that must be over before a work reads what it reads."""
        is_alone = issue.src is not None and issue.work.of not in self._state.under_way
        before = [] if is_alone else list(map(self.ticket, residency.before_it(self._state, issue)))
        if issue.src is not None and (filling := self._under_way.get((WorkKind.CREATE, issue.work.of, issue.src))):
            before += [filling.ticket]
        if self.is_queued:
            for unit, tier, _ in reads(issue, self._state.home):
                before += self._readiness.before_reading((unit, tier))
                if tier is self._compute:
                    before += self._readiness.computed()
        return before

    def _before_writing(self, issue: Issue, *, takes: bool) -> list[Ticket]:
        """All that must be over before a work writes what it writes. `takes`: into slots that have just been taken, which have fences."""
        (kind, ref, tier), before = issue.work, list[Ticket]()
        if kind is not WorkKind.UPDATE and tier is not Tier.DISK:
            before += self.units.fences(ref, tier, issue.slots)
            if filling := self._under_way.get((WorkKind.CREATE, ref, tier)):
                before += [filling.ticket]
        if self.is_queued:
            for unit, _, _ in writes(issue, self._state.home):
                before += self._readiness.before_writing((unit, tier))
            if tier is self._compute and not takes:
                before += self._readiness.computed()
        return before

    def _begin_by_chunk(self, ref: PlaneRef, src: Tier, dst: Tier, before: list[Ticket]) -> Ticket:
        """Begins the transfer of a run as one of each chunk, so that none waits for updates of others."""
        lane, chunks, filling = self.lane(src, dst), self.chunks(ref), self._under_way.get((WorkKind.CREATE, ref, src))
        slots, parts = self._state.slots[ref] // chunks, list[Ticket]()
        for number in range(chunks):
            work = self.units.copying(ref, src, dst, range(number * slots, (number + 1) * slots))
            update = self._under_way.get(Work.update(ref.chunk + number, src))
            # On a device an update that has been waited for is queued, and no more. The last one comes after all before it, and what was computed.
            after = self._readiness.before_reading((ref, src)) if update is None else [update.ticket]
            after += [filling.ticket] if filling else []
            parts.append(lane.issue(work, [*before, *after], nbytes=slots * self._state.slot_bytes))
        return lane.issue(_nothing, parts)

    # what is over

    def ticket(self, issue: Issue) -> Ticket:
        """The ticket of a work under way."""
        found = self._under_way.get(issue.work)
        if found is None:  # an interruption came before there was one, but perhaps not before the work had begun
            self.drain()
            return DONE
        return found.ticket

    def during(self, issue: Issue) -> str:
        """The moment at which a work was issued."""
        return self._under_way[issue.work].during or "this op"

    def over(self, issue: Issue) -> None:
        """Notes that a work has been waited for, or given up."""
        self._under_way.pop(issue.work, None)

    def wait_for_zeros(self, ref: PlaneRef, tier: Tier) -> None:
        """Waits for the filling of a unit's slots, if nobody has."""
        if (filling := self._under_way.get((WorkKind.CREATE, ref, tier))) is not None:
            filling.ticket.wait()
            del self._under_way[WorkKind.CREATE, ref, tier]

    def wait_on_host(self, ref: PlaneRef, tier: Tier) -> None:
        """Waits for what a device has queued on a unit's bytes on the host."""
        if self.is_queued:
            self._readiness.wait((ref, tier))

    def compute(self, touches: Collection[Touch]) -> None:
        """Has the device's stream of this thread, which is about to use these units of its tier, come after what is under way on them."""
        here = [touch for touch in touches if touch.tier is None or touch.tier is self._compute]
        self._readiness.compute(
            [(touch.ref, self._compute) for touch in here],
            writes=[(touch.ref, self._compute) for touch in here if touch.writes],
        )

    def give_slots(self, ref: PlaneRef, tier: Tier, slots: int) -> None:
        """Gives a unit's slots back, behind what is still under way on them."""
        filling = self._under_way.pop((WorkKind.CREATE, ref, tier), None)
        fence = None if filling is None else filling.ticket
        before = [] if fence is None else [fence]
        if self.poison or self.is_queued:
            before += self._readiness.before_writing((ref, tier))
            if tier is self._compute:
                before += self._readiness.computed()
            self._readiness.forget((ref, tier))
            if self.poison or before:
                work = self.units.poisoning(ref, tier, slots) if self.poison else _nothing
                fence = self.lane(tier, tier).issue(work, before)
        self.units.give(ref, tier, slots, fence=fence)

    # pages

    @property
    def arriving_slots(self) -> int:
        """Slots of the compute tier whose pages come with transfers that are under way, as far as they have not come."""
        return sum([0 if one.ticket.done else one.fresh_slots for one in self._under_way.values() if one.fresh_slots])

    def arriving_bytes(self) -> int:
        """Bytes of the pages that come with these transfers, without those that have. It takes a call of the system for each of them."""
        coming = (ref for (_, ref, _), one in self._under_way.items() if one.fresh_slots and not one.ticket.done)
        return sum(map(self.units.absent_bytes, coming))


def _nothing() -> None:
    """The work of a ticket for what comes before it."""


class Readiness:
    """The last works on each place that may still be under way on a device. `device`: None where nothing is, and nobody has to ask."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._streams: dict[int, torch.Stream] = {}
        self._written: dict[Place, Ticket] = {}
        self._read: dict[Place, list[Ticket]] = {}
        self._seen: dict[Place, set[int]] = {}

    def written(self, place: Place, ticket: Ticket) -> None:
        """Notes a work that writes there: the last one, which comes after all before it."""
        self._written[place] = ticket
        self._read.pop(place, None)
        self._seen.pop(place, None)

    def read(self, place: Place, ticket: Ticket) -> None:
        """Notes a work that reads there."""
        reading = self._read.setdefault(place, [])
        reading[:] = [earlier for earlier in reading if not earlier.done]
        reading.append(ticket)

    def before_reading(self, place: Place) -> list[Ticket]:
        """Tickets that a work which reads there comes after, but for what has been computed."""
        ticket = self._written.get(place)
        return [] if ticket is None else [ticket]

    def before_writing(self, place: Place) -> list[Ticket]:
        """Tickets that a work which writes there comes after, but for what has been computed."""
        return [*self.before_reading(place), *self._read.get(place, ())]

    def computed(self) -> list[Ticket]:
        """Tickets of all that has been queued so far by whoever computes with slots of the device."""
        return [StreamTicket(stream) for stream in self._streams.values()]

    def compute(self, places: Iterable[Place], *, writes: Iterable[Place] = ()) -> None:
        """Has the current stream of this thread, which is about to use these places of the device, wait for what is under way on them.

        `writes`: those of them that it will write to.
        """
        if self._device is None:
            return
        stream = torch.accelerator.current_stream(self._device)
        number = stream.stream_id
        self._streams.setdefault(number, stream)
        for place in places:
            ticket = self._written.get(place)
            if ticket is not None and number not in self._seen.setdefault(place, set()):
                ticket.wait_on_device()
                self._seen[place].add(number)
        for place in writes:
            for ticket in self._read.pop(place, ()):
                ticket.wait_on_device()

    def wait(self, place: Place) -> None:
        """Waits on the host for what is under way on a place of the host."""
        for ticket in self.before_writing(place):
            ticket.wait()
        self.forget(place)

    def forget(self, place: Place) -> None:
        """Forgets a place whose slots are given back, or which nothing is under way on."""
        self._written.pop(place, None)
        self._read.pop(place, None)
        self._seen.pop(place, None)


def lanes_of(
    *, bytes_per_second: float | None = None, stress_seed: int | None = None, device: torch.device | None = None
) -> MakeLane:
    """The lanes of a session: threads for the disk, so that both directions are used at once, and for updates, which an interruption of the
    caller does not leave half done; the rest where it is asked for.

    Args:
        bytes_per_second: of the emulated device's link, in each direction. stress_seed: makes every work of a thread late by chance.
        device: whose streams copy between it and the host, and fill and update what is there. What the host fills it fills beside the caller then.
    """
    random = None if stress_seed is None else Random(stress_seed)  # noqa: S311 - times to be late by

    def make(src: Tier, dst: Tier | None) -> Lane:
        name = f"{src.value} step" if dst is None else f"{src.value}>{dst.value}"
        lane: Lane
        if device is not None and Tier.DEVICE in (src, dst):
            return StreamLane(name, device)
        if bytes_per_second is not None and {src, dst} == {Tier.DEVICE, Tier.HOST}:
            lane = PacedLane(name, bytes_per_second=bytes_per_second)
        elif random is not None:
            lane = ThreadLane(name, works=_STRESSED_WORKS)
        elif Tier.DISK in (src, dst):
            lane = ThreadLane(name, works=DISK_REQUESTS)
        elif dst is None or device is not None:
            lane = ThreadLane(name)
        else:
            lane = InlineLane()
        return lane if random is None else StressedLane(lane, Random(random.random()))  # noqa: S311

    return make
