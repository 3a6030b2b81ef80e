"""The chunk store: where every unit is, and its bytes. State and bytes change in one place, and only as actions say.

    Issue    slots are taken where something is copied to or created; a lane does the work, perhaps over several moments; its ticket is kept
    Wait     the ticket's wait: from now on the bytes are there, or will be when the device has got so far (`readiness.py`)
    Drop     the slots are given back, poisoned where asked for, with a fence until that is over

Each work comes after those that it depends on, by the table of `plan/works.py`: what is written comes after the fences of its slots, and after
what still uses them, what is read after what writes it. What is created has no wait: whoever uses it first waits for its zeros.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor
from torch.profiler import record_function

from patrickstar.core.ledger import Ledger
from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Touch
from patrickstar.errors import DeviceError, StateError
from patrickstar.memory.arena import Arena
from patrickstar.memory.device_failure import DeviceFailureError, located
from patrickstar.memory.disk import DiskPool
from patrickstar.memory.interruptions import InterruptionsPutOff
from patrickstar.memory.lanes import DONE, Task, Ticket
from patrickstar.memory.leases import Leases
from patrickstar.memory.links import Links
from patrickstar.memory.readiness import Readiness
from patrickstar.plan import residency
from patrickstar.plan.actions import Action, Drop, Issue, Wait, Work, WorkKind
from patrickstar.plan.residency import InvariantError, Residency
from patrickstar.plan.works import reads, writes
from patrickstar.torch_private import is_profiled

__all__ = ["ChunkStore"]

UpdateWork = Callable[[int, Tier], Task]  # makes the work of a chunk's update on a tier


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A work that has been issued. `during`: the moment of that; `fresh_slots`: slots of the compute tier whose pages come with it."""

    ticket: Ticket
    during: str
    fresh_slots: int


class ChunkStore:
    """Slots and extents of every unit, the bytes in them, and who holds them.

    Args:
        state: where every unit is; belongs to the store from now on, to be read by everybody.
        arenas: an arena for each memory tier in use; disk: the disk tier, or None. links: the lanes between them.
        dtype: see below. chunks: number of chunks of a unit's run.
        ledger: is told of every slot taken and given back, and of every byte that crosses a link; what rests below the compute tier is in it.
        device: whose streams the lanes of links and of the compute tier are; None: there are none. poison: whether slots given back are
            filled with NaN.

    Attributes:
        leases: on slots of the compute tier, and on what is held in the stead of one.
        dtype: the torch type of a unit's elements. has_disk: true where anything can rest on a disk.
        slots_here: the first slot of each unit on the compute tier.
        committed_slots: slots of the compute tier that may hold pages now. limit_slots: how many may, those in use and those kept warm.
        hold_beside: notes how many bytes of non-model data are on the compute tier now.
        log: the actions carried out since it was last cleared, where `keep_log` is set; otherwise empty.
    """

    def __init__(
        self,
        state: Residency,
        *,
        arenas: Mapping[Tier, Arena],
        disk: DiskPool | None,
        links: Links,
        dtype: Callable[[PlaneRef], torch.dtype],
        chunks: Callable[[PlaneRef], int],
        ledger: Ledger,
        device: torch.device | None = None,
        poison: bool = False,
    ) -> None:
        self.state = state
        self._arenas = arenas
        self._disk = disk
        self._links = links
        self._chunks = chunks
        self._compute = state.compute
        self._poison = poison
        self._readiness = Readiness(device)
        self._process = os.getpid()

        self.leases = Leases(self.tensor, self.part)
        self.ledger = ledger
        self.dtype = dtype
        self.has_disk = disk is not None
        self.keep_log = False
        self.log: list[Action] = []
        self.committed_slots = 0
        self.hold_beside = partial(ledger.nonmodel, state.compute)
        self.limit_slots = arenas[state.compute].virtual_slots
        self._at: dict[Tier, dict[PlaneRef, int]] = {tier: {} for tier in arenas}
        self.slots_here: Mapping[PlaneRef, int] = self._at[state.compute]
        self._under_way: dict[tuple[WorkKind, PlaneRef, Tier], _UnderWay] = {}  # by work
        self._wrap: dict[PlaneRef, Callable[[], Tensor]] = {}

    # what is there

    def tensor(self, ref: PlaneRef, tier: Tier | None = None) -> Tensor:
        """A 1-D tensor over a fresh storage of a unit's slots, on the compute tier or on one below. The slots may move unless a lease is taken.

        Raises:
            InvariantError: the bytes are not there, or still on their way. StateError: the store is closed, or of another process.
        """
        if ref in self.state.under_way and (updates := self.state.updates_of(ref)):
            raise InvariantError(10, f"{ref} is used while {updates[0]} is under way")
        if tier is not None and tier is not self._compute:
            return self._wrapping(ref, tier)()
        wrap = self._wrap.get(ref)
        if wrap is None or os.getpid() != self._process:
            wrap = self._wrap[ref] = self._wrapping(ref, self._compute)
        return wrap()

    def part(self, ref: PlaneRef, part: slice) -> Tensor:
        """Elements of a unit on the compute tier, as `tensor` gives the whole of it: over a fresh storage of their own."""
        self.tensor(ref)
        first = self._at[self._compute][ref]
        return self._arenas[self._compute].wrapping(first, self.state.slots[ref], self.dtype(ref), part=part)()

    def operand(self, ref: PlaneRef, tier: Tier) -> Tensor:
        """A tensor as `tensor` gives it, for the work of an update that is about to be issued: its bytes may still change until that begins."""
        return self._wrapped(ref, tier)()

    def compute(self, touches: Collection[Touch]) -> None:
        """Has the device's stream of this thread, which is about to use these units of its tier, come after what is under way on them."""
        if self._readiness.is_needed:
            here = [touch for touch in touches if touch.tier is None or touch.tier is self._compute]
            self._readiness.compute(
                [(touch.ref, self._compute) for touch in here],
                writes=[(touch.ref, self._compute) for touch in here if touch.writes],
            )

    def _wrapping(self, ref: PlaneRef, tier: Tier) -> Callable[[], Tensor]:
        if self.state.is_arriving(ref, tier):
            raise InvariantError(1, f"{ref} is used on the {tier.label}, still on its way")
        if tier is not self._compute and self._readiness.is_needed:
            self._readiness.wait((ref, tier))
        return self._wrapped(ref, tier)

    def _wrapped(self, ref: PlaneRef, tier: Tier) -> Callable[[], Tensor]:
        first = self._at[tier].get(ref)
        if first is None:
            raise InvariantError(1, f"{ref} is used on the {tier.label}, without slots")
        for filling in self._zeros(ref, tier):
            filling.wait()
            del self._under_way[WorkKind.CREATE, ref, tier]
        return self._arenas[tier].wrapping(first, self.state.slots[ref], self.dtype(ref))

    def _zeros(self, ref: PlaneRef, tier: Tier) -> list[Ticket]:
        """The filling of a unit's slots, if nobody has waited for it."""
        filling = self._under_way.get((WorkKind.CREATE, ref, tier))
        return [] if filling is None else [filling.ticket]

    # what changes

    def carry_out(self, actions: Sequence[Action], *, during: str = "", update_work: UpdateWork | None = None) -> None:
        """Does what the actions say, in order: on the state and on the bytes alike, so that neither can be ahead of the other.

        A transfer that fails raises DeviceError, perhaps moments later, and changes nothing: what was to be written back is still where it was,
        and what was to be fetched is still at home. Other transfers under way are waited for first. A profile shows each action by its text.

        Args:
            during: the moment, for a message. update_work: makes the work of a chunk's update on a tier.
        Raises:
            StateError: the store is of another process, whose transfers nobody here can wait for.
        """
        if os.getpid() != self._process:
            self._arenas[self._compute].expect_open()
        for waits, group in groupby(actions, key=lambda action: isinstance(action, Wait)):
            # Nobody waits in between: what is moved, and what is noted of it, belong together.
            with nullcontext() if waits else InterruptionsPutOff():
                for action in group:
                    self._carry_out_one(action, during, update_work)

    def _carry_out_one(self, action: Action, during: str, update_work: UpdateWork | None) -> None:
        try:
            if is_profiled():
                with record_function(str(action)):
                    self._do(action, during, update_work)
            else:
                self._do(action, during, update_work)
        except BaseException as error:
            self.land_all()  # also after an interruption by the user, of which the next may come while this one is settled
            if isinstance(error, torch.AcceleratorError | DeviceFailureError):
                raise located(error, f"{action}, in op {during}" if during else str(action)) from error
            raise
        if self.keep_log:
            self.log.append(action)

    def wait_for_updates(self) -> None:
        """Waits for all updates under way."""
        self.carry_out(list(map(Wait, self.state.updates)))

    def _do(self, action: Action, during: str, update_work: UpdateWork | None) -> None:
        match action:
            case Issue():
                self._issue(action, during, update_work)
            case Wait():
                for issue in (over := residency.ended_by(self.state, action)):
                    self._wait(issue)
                self._note(over)
            case Drop(ref, tier, slots):
                residency.apply(self.state, action)
                self._give(ref, tier, slots)

    def _note(self, over: Sequence[Issue]) -> None:
        """Notes that works have been waited for."""
        with InterruptionsPutOff():
            residency.finish(self.state, over)
            for issue in over:
                self._under_way.pop(issue.work, None)

    def _wait(self, issue: Issue) -> None:
        try:
            self._ticket(issue).wait_until_settled()
        except (StateError, torch.AcceleratorError):  # of the lane or the device, not of this work
            raise
        except Exception as error:
            if issue.src is None:
                raise
            (_, ref, tier), during = issue.work, self._under_way[issue.work].during or "this op"
            this = f"{ref} on its way from the {issue.src.label} to the {tier.label}, issued at {during}"
            if isinstance(error, DeviceFailureError):
                raise located(error, this) from error
            raise DeviceError(f"{error}\n  this was {this}") from error

    def _ticket(self, issue: Issue) -> Ticket:
        """The ticket of a work under way."""
        found = self._under_way.get(issue.work)
        if found is None:  # an interruption came before there was one, but perhaps not before the work had begun
            self._links.drain()
            return DONE
        return found.ticket

    def land(self, ref: PlaneRef) -> None:
        """Waits for the works under way that use a unit."""
        while users := self.state.used_by(ref):
            self.carry_out([Wait(users[0].work)])

    def land_all(self) -> None:
        """Waits for all works under way; those that fail are given up."""
        while self.state.under_way:
            wait = Wait(next(iter(self.state.under_way.values())).by[0].work)
            for issue in residency.ended_by(self.state, wait):
                self._land(issue)

    def _land(self, issue: Issue) -> None:
        """Waits for a work. A transfer that has failed is undone; of an update that has, whoever has given the work knows."""
        try:
            self._ticket(issue).wait()
        except Exception:  # whatever a lane has raised: the work has not been done
            if issue.src is not None:
                _, ref, tier = issue.work
                with InterruptionsPutOff():
                    residency.give_up(self.state, ref)
                    if self.state.has_slots_to_take(ref, tier):
                        self._give(ref, tier, issue.slots)
                    del self._under_way[issue.work]
                return
            residency.want_again(self.state, issue)
        self._note([issue])

    def wrote(self, ref: PlaneRef, tier: Tier | None = None) -> None:
        """Notes that a unit has been written, on the compute tier or on one below."""
        with InterruptionsPutOff():
            residency.mark_written(self.state, ref, tier)

    def forget(self, ref: PlaneRef) -> None:
        """Drops a unit's contents, which nobody wants any more but an update under way; its slots go when room is needed."""
        if not self.state.updates_of(ref):
            self.land(ref)
        with InterruptionsPutOff():
            residency.mark_free(self.state, ref)

    def release(self, ref: PlaneRef) -> None:
        """Drops a unit's contents, which nobody wants any more, and gives its slots back."""
        if self.state.is_free(ref) and not any(ref in refs for refs in self.state.taken.values()):
            return
        self.land(ref)
        with InterruptionsPutOff():
            self.carry_out(residency.release(self.state, ref))

    # units that come later

    def prepare(self, homes: Mapping[PlaneRef, Tier], slots: Mapping[PlaneRef, int]) -> None:
        """Sets aside on the disk what `grow` will need. DeviceError, BudgetError: the disk has no room; nothing has changed then."""
        units = {ref: slots[ref] * self.state.slot_bytes for ref, tier in homes.items() if tier is Tier.DISK}
        if units:
            self._pool().add(units)

    def grow(self, homes: Mapping[PlaneRef, Tier], slots: Mapping[PlaneRef, int]) -> None:
        """Takes in units that have been prepared, or gives units another size: without contents, at home on these tiers."""
        state = self.state
        for ref, tier in homes.items():
            if ref in state.home:
                self._leave_home(ref)
            if tier is not self._compute:
                self.ledger.add(tier, slots[ref] * state.slot_bytes)
            if tier is Tier.DISK:
                self._pool().take(ref)
        state.grow(homes, slots)

    def shrink(self, refs: Collection[PlaneRef]) -> None:
        """Takes units out that are at home in memory, and without contents."""
        for ref in refs:
            self.release(ref)
            self._leave_home(ref)
        self.state.shrink(refs)

    def _leave_home(self, ref: PlaneRef) -> None:
        """Gives the slots back in which a unit without contents rests on a memory tier."""
        for tier, places in self._at.items():
            if ref in places:
                self._wrap.pop(ref, None)
                self._give_slots(ref, tier, places.pop(ref), self.state.slots[ref])
        if self.state.home[ref] is not self._compute:
            self.ledger.remove(self.state.home[ref], self.state.unit_bytes(ref))

    # pages

    @property
    def arriving_slots(self) -> int:
        """Slots of the compute tier whose pages come with transfers that are under way, as far as they have not come."""
        return sum(coming.fresh_slots for _, coming in self._coming())

    def arriving_bytes(self) -> int:
        """Bytes of the pages that come with these transfers, without those that have. It takes a call of the system for each of them."""
        arena, at, slots = self._arenas[self._compute], self._at[self._compute], self.state.slots
        return sum(arena.absent_bytes(at[ref], slots[ref]) for ref, _ in self._coming())

    def _coming(self) -> list[tuple[PlaneRef, _UnderWay]]:
        return [(ref, one) for (_, ref, _), one in self._under_way.items() if one.fresh_slots and not one.ticket.done]

    def trim(self) -> None:
        """Gives pages of free slots back to the system until no more than `limit_slots` hold any, if that can be."""
        if self.committed_slots > self.limit_slots:
            self._arenas[self._compute].trim(self.limit_slots)
            self.committed_slots = self._arenas[self._compute].committed_slots

    def close(self) -> None:
        """Gives everything back, when nothing is under way any more. Whatever still refers to a slot keeps the slot's memory."""
        self._links.close()
        with suppress(DeviceFailureError):  # nothing runs on a device that has failed
            for ticket in self._readiness.computed():
                ticket.wait()
        self._wrap.clear()
        with ExitStack() as ends:  # each is closed, whatever another raises
            if self._disk is not None:
                ends.callback(self._disk.close)
            for tier, arena in self._arenas.items():
                ends.callback(arena.close, self.leases.storages() if tier is self._compute else ())

    def _take(self, ref: PlaneRef, tier: Tier, slots: int) -> None:
        arena = self._arenas[tier]
        limit = self.limit_slots if tier is self._compute else None
        self._at[tier][ref] = arena.take(slots, max_committed_slots=limit)
        if tier is self._compute:
            self.committed_slots = arena.committed_slots
        if self.state.has_slots_to_take(ref, tier):
            self.ledger.add(tier, slots * arena.slot_bytes)

    def _give(self, ref: PlaneRef, tier: Tier, slots: int) -> None:
        if tier is self._compute:
            self._wrap.pop(ref, None)
        self._give_slots(ref, tier, self._at[tier].pop(ref), slots)
        if self.state.has_slots_to_take(ref, tier):
            self.ledger.remove(tier, slots * self._arenas[tier].slot_bytes)

    def _give_slots(self, ref: PlaneRef, tier: Tier, first: int, slots: int) -> None:
        """Gives slots back to their arena, behind what is still under way on them."""
        before, arena = self._zeros(ref, tier), self._arenas[tier]
        self._under_way.pop((WorkKind.CREATE, ref, tier), None)
        fence = before[0] if before else None
        if self._poison or self._readiness.is_needed:
            before += self._readiness.before_writing((ref, tier))
            if tier is self._compute:
                before += self._readiness.computed()
            self._readiness.forget((ref, tier))
            if self._poison or before:
                work = arena.filling(first, slots, poison=True) if self._poison else _nothing
                fence = self._links.lane(tier, tier).issue(work, before)
        arena.give(first, slots, fence=fence)

    def _issue(self, issue: Issue, during: str, update_work: UpdateWork | None) -> None:
        """Has a work begin: on its lane, after what it has to come after."""
        (kind, ref, tier), src = issue.work, issue.src
        is_update, committed_slots = kind is WorkKind.UPDATE, self.committed_slots
        # At home it may have rested before.
        takes = not is_update and tier is not Tier.DISK and ref not in self._at[tier]
        if takes:
            self._take(ref, tier, issue.slots)
        task = self._task(issue, update_work)
        if is_update:
            residency.apply(self.state, issue)
        try:
            ticket = self._begin(issue, task, takes=takes)
        except BaseException:
            if takes:  # it has not been issued: the state knows nothing of it, and neither may the slots
                self._give(ref, tier, issue.slots)
            raise
        fresh_slots = self.committed_slots - committed_slots if src is not None and tier is self._compute else 0
        self._under_way[issue.work] = _UnderWay(ticket, during, fresh_slots)
        if self._readiness.is_needed:
            self._note_places(issue, ticket)
        if src is not None:
            self.ledger.move(src, tier, self.state.unit_bytes(ref))
        if not is_update:
            residency.apply(self.state, issue)

    def _note_places(self, issue: Issue, ticket: Ticket) -> None:
        """Notes what a work reads and writes, for what comes after it on a device."""
        kind, _, tier = issue.work
        for place in reads(issue, self.state.home):
            self._readiness.read(place[:2], ticket)
        for place in writes(issue, self.state.home):
            self._readiness.written(place[:2], ticket)
        if kind is WorkKind.CREATE and tier is self._compute:
            del self._under_way[issue.work]  # nobody waits for it on the host

    def _task(self, issue: Issue, update_work: UpdateWork | None) -> Task:
        """The task of a lane by which a work is done."""
        (kind, ref, tier), src, slots = issue.work, issue.src, issue.slots
        if kind is WorkKind.UPDATE:
            assert update_work is not None, "nobody knows of updates"
            return update_work(ref.chunk, tier)
        if tier is Tier.DISK and src is not None:
            return self._pool().writing(ref, self._arenas[src].buffer(self._at[src][ref], slots))
        arena, first = self._arenas[tier], self._at[tier][ref]
        if src is None:
            return arena.filling(first, slots)
        if src is Tier.DISK:
            return self._pool().reading(ref, arena.buffer(first, slots))
        return arena.copying(first, slots, self._arenas[src], self._at[src][ref])

    def _begin(self, issue: Issue, task: Task, *, takes: bool) -> Ticket:
        (kind, ref, tier), src = issue.work, issue.src
        before = self._before_writing(issue, takes=takes)
        if src is None:
            lane, nbytes = self._links.lane(tier, None if kind is WorkKind.UPDATE else tier), 0
        elif ref in self.state.under_way and len(self.state.updates_of(ref)) > 1:
            return self._begin_by_chunk(ref, src, tier, before)
        else:
            lane, nbytes = self._links.lane(src, tier), self.state.unit_bytes(ref)
        return lane.issue(task, [*before, *self._before_reading(issue)], nbytes=nbytes)

    def _before_reading(self, issue: Issue) -> list[Ticket]:
        """All that must be over before a work reads what it reads."""
        before = [self._ticket(earlier) for earlier in residency.before_it(self.state, issue)]
        if issue.src is not None:
            before += self._zeros(issue.work.of, issue.src)
        if self._readiness.is_needed:
            for unit, tier, _ in reads(issue, self.state.home):
                before += self._readiness.before_reading((unit, tier))
                if tier is self._compute:
                    before += self._readiness.computed()
        return before

    def _before_writing(self, issue: Issue, *, takes: bool) -> list[Ticket]:
        """All that must be over before a work writes what it writes. `takes`: into slots that have just been taken, which have fences."""
        (kind, ref, tier), before = issue.work, list[Ticket]()
        if kind is not WorkKind.UPDATE and tier is not Tier.DISK:
            before += self._arenas[tier].fences(self._at[tier][ref], issue.slots)
            before += self._zeros(ref, tier)
        if self._readiness.is_needed:
            for unit, _, _ in writes(issue, self.state.home):
                before += self._readiness.before_writing((unit, tier))
            if tier is self._compute and not takes:
                before += self._readiness.computed()
        return before

    def _begin_by_chunk(self, ref: PlaneRef, src: Tier, dst: Tier, before: list[Ticket]) -> Ticket:
        """Begins the transfer of a run as one of each chunk, so that none waits for updates of others."""
        lane, chunks = self._links.lane(src, dst), self._chunks(ref)
        slots, parts = self.state.slots[ref] // chunks, list[Ticket]()
        for number in range(chunks):
            first, source_first = self._at[dst][ref] + number * slots, self._at[src][ref] + number * slots
            work = self._arenas[dst].copying(first, slots, self._arenas[src], source_first)
            update = self._under_way.get(Work.update(ref.chunk + number, src))
            # On a device an update that has been waited for is queued, and no more. The last one comes after all before it, and what was computed.
            after = self._readiness.before_reading((ref, src)) if update is None else [update.ticket]
            after += self._zeros(ref, src)
            parts.append(lane.issue(work, [*before, *after], nbytes=slots * self.state.slot_bytes))
        return lane.issue(_nothing, parts)

    def _pool(self) -> DiskPool:
        assert self._disk is not None, "a plan moves units to a disk tier that does not exist"
        return self._disk


def _nothing() -> None:
    """The work of a ticket for what comes before it."""
