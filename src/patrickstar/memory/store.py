"""The chunk store: where every unit is, and its bytes. State and bytes change in one place, and only as actions say.

On a tier a unit's bytes are in slots of that tier's arena, or in an extent of the disk pool. What may be trusted where is the matter of
`plan/residency.py`, whose state the store owns.

    Create   slots are taken, and filled with zeros before their first use
    Copy     slots are taken where the copy arrives; the bytes follow, perhaps over several moments; a ticket is kept
    Wait     the ticket's wait: from now on the copy holds the bytes, or will when the device has got so far (`readiness.py`)
    Drop     the slots are given back, poisoned where asked for, with a fence until that is over
    Update   the work of a chunk's update begins, on the lane for that, once its gradient has come; a ticket is kept until its wait

All bytes are moved and filled on lanes, each work after those that it depends on: what is written comes after the fences of its slots, and what is
read after their filling.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
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
from patrickstar.memory.lanes import Ticket, Work
from patrickstar.memory.leases import Leases
from patrickstar.memory.links import Links
from patrickstar.memory.readiness import Readiness
from patrickstar.plan import residency
from patrickstar.plan.actions import Action, Copy, Create, Drop, Update, UpdateWait, Wait
from patrickstar.plan.residency import InvariantError, Residency
from patrickstar.torch_private import is_profiled

__all__ = ["ChunkStore"]


class ChunkStore:
    """Slots and extents of every unit, the bytes in them, and who holds them.

    Args:
        state: where every unit is; belongs to the store from now on, to be read by everybody.
        arenas: an arena for each memory tier in use; disk: the disk tier, or None. links: the lanes between them.
        dtype: torch type of a unit's elements. chunks: number of chunks of a unit's run.
        ledger: is told of every slot taken and given back, and of every byte that crosses a link; what rests below the compute tier is in it.
        device: whose streams the lanes of links and of the compute tier are; None: there are none. poison: whether slots given back are
            filled with NaN.

    Attributes:
        leases: on slots of the compute tier, and on what is held in the stead of one.
        committed_slots: slots of the compute tier that may hold pages now. limit_slots: how many may, those in use and those kept warm.
        log: the actions carried out since it was last cleared, where `keep_log` is set; otherwise empty.
        update_work: makes the work of a chunk's update on a tier; set by who knows of updates.
    """

    update_work: Callable[[int, Tier], Work]

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
        self._dtype = dtype
        self._chunks = chunks
        self._ledger = ledger
        self._compute = state.compute
        self._poison = poison
        self._readiness = Readiness(device)
        self._process = os.getpid()

        self.leases = Leases(self.tensor)
        self.keep_log = False
        self.log: list[Action] = []
        self.committed_slots = 0
        self.limit_slots = arenas[state.compute].virtual_slots
        self._at: dict[Tier, dict[PlaneRef, int]] = {tier: {} for tier in arenas}
        self._fresh: dict[PlaneRef, int] = {}
        self._tickets: dict[tuple[PlaneRef, Tier], Ticket] = {}
        self._issued_at: dict[PlaneRef, str] = {}
        self._filling: dict[tuple[PlaneRef, Tier], Ticket] = {}
        self._updates: dict[int, Ticket] = {}
        self._wrap: dict[PlaneRef, Callable[[], Tensor]] = {}
        self._beside_bytes = self._most_beside_bytes = 0

    # what is there

    def dtype(self, ref: PlaneRef) -> torch.dtype:
        """The torch type of a unit's elements."""
        return self._dtype(ref)

    def tensor(self, ref: PlaneRef, tier: Tier | None = None) -> Tensor:
        """A 1-D tensor over a fresh storage of a unit's slots, on the compute tier or on one below. The slots may move unless a lease is taken.

        Raises:
            InvariantError: the bytes are not there, or still on their way. StateError: the store is closed, or of another process.
        """
        if ref in self.state.in_update:
            raise InvariantError(
                10, f"{ref} is used while an update of chunk {min(self.state.in_update[ref])} is under way"
            )
        if tier is not None and tier is not self._compute:
            return self._wrapping(ref, tier)()
        wrap = self._wrap.get(ref)
        if wrap is None or os.getpid() != self._process:
            wrap = self._wrap[ref] = self._wrapping(ref, self._compute)
        return wrap()

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
        if self._is_arriving(ref, tier):
            raise InvariantError(1, f"{ref} is used on the {tier.label}, still on its way")
        return self._place(ref, tier)

    def _is_arriving(self, ref: PlaneRef, tier: Tier) -> bool:
        return self.state.in_flight.get(ref, (None, None))[1] is tier

    def _place(self, ref: PlaneRef, tier: Tier) -> Callable[[], Tensor]:
        if tier is not self._compute and self._readiness.is_needed:
            self._readiness.wait((ref, tier))
        return self._wrapped(ref, tier)

    def _wrapped(self, ref: PlaneRef, tier: Tier) -> Callable[[], Tensor]:
        first = self._at[tier].get(ref)
        if first is None:
            raise InvariantError(1, f"{ref} is used on the {tier.label}, without slots")
        filling = self._filling.get((ref, tier))
        if filling is not None:
            filling.wait()
            del self._filling[ref, tier]
        return self._arenas[tier].wrapping(first, self.state.slots[ref], self._dtype(ref))

    @property
    def has_disk(self) -> bool:
        """True where anything can rest on a disk."""
        return self._disk is not None

    @property
    def ledger(self) -> Ledger:
        """Bytes by tier and by link, up to date."""
        self._tell_ledger()
        return self._ledger

    # what changes

    def carry_out(self, actions: Sequence[Action], *, during: str = "") -> None:
        """Does what the actions say, in order: on the state and on the bytes alike, so that neither can be ahead of the other.

        A transfer that fails raises DeviceError, perhaps moments later, and changes nothing: what was to be written back is still where it was,
        and what was to be fetched is still at home. Other transfers under way are waited for first. A profile shows each action by its text.

        Args:
            during: the moment, for a message.
        Raises:
            StateError: the store is of another process, whose transfers nobody here can wait for.
        """
        self._expect_own_process()
        for waits, group in groupby(actions, key=lambda action: isinstance(action, Wait | UpdateWait)):
            # Nobody waits in between: what is moved, and what is noted of it, belong together.
            with nullcontext() if waits else InterruptionsPutOff():
                for action in group:
                    self._carry_out_one(action, during)

    def _carry_out_one(self, action: Action, during: str) -> None:
        try:
            if is_profiled():
                with record_function(str(action)):
                    self._move_and_apply(action)
            else:
                self._move_and_apply(action)
        except (torch.AcceleratorError, DeviceFailureError) as error:
            self.land_all()
            raise located(error, f"{action}, in moment {during}" if during else str(action)) from error
        except BaseException:  # a transfer that failed, or an interruption by the user, of which the next may come while this one is settled
            self.land_all()
            raise
        if isinstance(action, Copy):
            self._issued_at[action.ref] = during
        if self.keep_log:
            self.log.append(action)

    def _expect_own_process(self) -> None:
        if os.getpid() != self._process:
            self._arenas[self._compute].expect_open()

    def wait_for_updates(self) -> None:
        """Waits for all updates under way."""
        self.carry_out([UpdateWait(chunk, tier) for chunk, tier in self.state.updating.items()])

    def _give_up(self, action: Wait) -> None:
        """Undoes a transfer whose wait has failed."""
        ref, tier = action.ref, action.tier
        with InterruptionsPutOff():
            if self.state.has_slots_to_take(ref, tier):
                self._move(Drop(ref, tier, self.state.slots[ref]))
            residency.give_up(self.state, ref)
            self._landed(ref, tier)

    def _has_arrived(self, ref: PlaneRef, tier: Tier) -> bool:
        """Waits for a transfer, which is given up where it fails; tells whether it has not."""
        ticket = self._tickets[ref, tier]
        try:
            ticket.wait()
        except Exception:  # whatever a lane has raised: the transfer has not been done
            self._give_up(Wait(ref, tier))
            return False
        return True

    def _move_and_apply(self, action: Action) -> None:
        if isinstance(action, Update):
            work = self.update_work(action.chunk, action.tier)
            residency.apply(self.state, action)
            # Other updates of its run need not be over: each has a part of the weight for itself.
            before = [self._tickets[ref, action.tier] for ref in residency.arriving_for(self.state, action.chunk)]
            units = residency.units_of_update(self.state, action.chunk)
            for ref in units:
                before += self._readiness.before_writing((ref, action.tier))
            if action.tier is self._compute:
                before += self._readiness.computed()
            ticket = self._links.lane(action.tier, None).issue(work, before)
            self._updates[action.chunk] = ticket
            for ref in units:
                self._readiness.written((ref, action.tier), ticket)
            return
        self._move(action)
        self._apply(action)

    def _apply(self, action: Action) -> None:
        """Notes what has been moved."""
        with InterruptionsPutOff():
            arrived = residency.arriving_for(self.state, action.chunk) if isinstance(action, UpdateWait) else []
            residency.apply(self.state, action)
            if isinstance(action, Wait):
                self._landed(action.ref, action.tier)
            elif isinstance(action, UpdateWait):
                for ref in arrived:
                    self._landed(ref, action.tier)
                self._updates.pop(action.chunk, None)

    def _wait_for_update(self, chunk: int) -> None:
        ticket = self._updates.get(chunk)
        if ticket is None:  # an interruption came before there was one, but perhaps not before the work had begun
            self._links.drain()
        else:
            ticket.wait_until_settled()

    def _landed(self, ref: PlaneRef, tier: Tier) -> None:
        self._tickets.pop((ref, tier), None)
        self._issued_at.pop(ref, None)
        if tier is self._compute:
            self._fresh.pop(ref, None)

    def _move(self, action: Action) -> None:
        match action:
            case Create(ref, tier, slots):
                if ref not in self._at[tier]:  # at home it may have rested before
                    self._take(ref, tier, slots)
                self._fill(ref, tier, slots)
            case Copy(ref, src, dst, _):
                self._copy(ref, src, dst)
            case Wait(ref, tier):
                self._wait(ref, tier)
            case Drop(ref, tier, slots):
                self._give(ref, tier, slots)
            case UpdateWait(chunk, tier):
                for ref in residency.arriving_for(self.state, chunk):
                    self._wait(ref, tier)
                self._wait_for_update(chunk)

    def _wait(self, ref: PlaneRef, tier: Tier) -> None:
        try:
            self._tickets[ref, tier].wait_until_settled()
        except (StateError, torch.AcceleratorError):  # of the lane or the device, not of this transfer
            raise
        except Exception as error:
            src = self.state.in_flight[ref][0].label
            this = f"{ref} on its way from the {src} to the {tier.label}, issued at {self._issued_at.get(ref) or 'this moment'}"
            if isinstance(error, DeviceFailureError):
                raise located(error, this) from error
            raise DeviceError(f"{error}\n  this was {this}") from error

    def land(self, ref: PlaneRef) -> None:
        """Waits for an update that uses a unit and for a transfer of it, if they are under way."""
        updates = sorted(self.state.in_update.get(ref, ()))
        self.carry_out([UpdateWait(chunk, self.state.updating[chunk]) for chunk in updates])
        self._land_transfer(ref)

    def land_all(self) -> None:
        """Waits for all transfers and updates under way; those that fail are given up."""
        for chunk, tier in list(self.state.updating.items()):
            try:
                self._wait_for_update(chunk)
            except Exception:  # whoever has given the work knows of it; what it uses may be wanted again
                self.state.unwanted.difference_update(residency.units_of_update(self.state, chunk))
            for ref in residency.arriving_for(self.state, chunk):
                self._has_arrived(ref, tier)
            self._apply(UpdateWait(chunk, tier))
        for ref, (_, tier) in list(self.state.in_flight.items()):
            if self._has_arrived(ref, tier):
                self._apply(Wait(ref, tier))

    def _land_transfer(self, ref: PlaneRef) -> None:
        if ref in self.state.in_flight:
            self.carry_out([Wait(ref, self.state.in_flight[ref][1])])

    def wrote(self, ref: PlaneRef, tier: Tier | None = None) -> None:
        """Notes that a unit has been written, on the compute tier or on one below."""
        with InterruptionsPutOff():
            residency.mark_written(self.state, ref, tier)

    def forget(self, ref: PlaneRef) -> None:
        """Drops a unit's contents, which nobody wants any more but an update under way; its slots go when room is needed."""
        if ref not in self.state.in_update:
            self._land_transfer(ref)
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
                if state.home[ref] is not self._compute:
                    self.ledger.remove(state.home[ref], state.unit_bytes(ref))
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
            if self.state.home[ref] is not self._compute:
                self.ledger.remove(self.state.home[ref], self.state.unit_bytes(ref))
        self.state.shrink(refs)

    def _leave_home(self, ref: PlaneRef) -> None:
        """Gives the slots back in which a unit without contents rests on a memory tier."""
        for tier, places in self._at.items():
            if ref in places:
                self._wrap.pop(ref, None)
                self._give_slots(ref, tier, places.pop(ref), self.state.slots[ref])

    # pages, and what lies beside

    @property
    def arriving_slots(self) -> int:
        """Slots of the compute tier whose pages come with transfers that are under way, as far as they have not come."""
        return sum(self._fresh[ref] for ref in self._coming())

    def arriving_bytes(self) -> int:
        """Bytes of the pages that come with these transfers, without those that have. It takes a call of the system for each of them."""
        arena, at, slots = self._arenas[self._compute], self._at[self._compute], self.state.slots
        return sum(arena.absent_bytes(at[ref], slots[ref]) for ref in self._coming())

    def _coming(self) -> list[PlaneRef]:
        if not self._fresh:
            return []
        return [ref for ref in self._fresh if not self._tickets[ref, self._compute].done]

    def trim(self) -> None:
        """Gives pages of free slots back to the system until no more than `limit_slots` hold any, if that can be."""
        if self.committed_slots > self.limit_slots:
            arena = self._arenas[self._compute]
            arena.trim(self.limit_slots)
            self.committed_slots = arena.committed_slots

    def hold_beside(self, nbytes: int) -> None:
        """Notes how many bytes of non-model data are on the compute tier now."""
        self._beside_bytes = nbytes
        self._most_beside_bytes = max(self._most_beside_bytes, nbytes)

    def _tell_ledger(self) -> None:
        """Tells the ledger the most of what lay beside chunks since they changed last, before they change again: only that makes a peak."""
        if self._most_beside_bytes != self._beside_bytes:
            self._ledger.nonmodel(self._compute, self._most_beside_bytes)
            self._most_beside_bytes = self._beside_bytes
        self._ledger.nonmodel(self._compute, self._beside_bytes)

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
        if not self._is_reserved(ref, tier):
            self._tell_ledger()
            self._ledger.add(tier, slots * arena.slot_bytes)

    def _give(self, ref: PlaneRef, tier: Tier, slots: int) -> None:
        if tier is self._compute:
            self._wrap.pop(ref, None)
        self._give_slots(ref, tier, self._at[tier].pop(ref), slots)
        if not self._is_reserved(ref, tier):
            self._tell_ledger()
            self._ledger.remove(tier, slots * self._arenas[tier].slot_bytes)

    def _is_reserved(self, ref: PlaneRef, tier: Tier) -> bool:
        return not self.state.has_slots_to_take(ref, tier)

    def _give_slots(self, ref: PlaneRef, tier: Tier, first: int, slots: int) -> None:
        """Gives slots back to their arena, behind what is still under way on them."""
        fence, arena = self._filling.pop((ref, tier), None), self._arenas[tier]
        if self._poison or self._readiness.is_needed:
            before = [] if fence is None else [fence]
            before += self._readiness.before_writing((ref, tier))
            if tier is self._compute:
                before += self._readiness.computed()
            self._readiness.forget((ref, tier))
            if self._poison or before:
                work = arena.filling(first, slots, poison=True) if self._poison else _nothing
                fence = self._links.lane(tier, tier).issue(work, before)
        arena.give(first, slots, fence=fence)

    def _fill(self, ref: PlaneRef, tier: Tier, slots: int) -> None:
        """Has a unit's slots filled with zeros."""
        arena, first = self._arenas[tier], self._at[tier][ref]
        before = [*arena.fences(first, slots), *self._before_writing(ref, tier)]
        ticket = self._links.lane(tier, tier).issue(arena.filling(first, slots), before)
        if tier is self._compute and self._readiness.is_needed:
            self._readiness.written((ref, tier), ticket)
        else:
            self._filling[ref, tier] = ticket

    def _before_reading(self, ref: PlaneRef, tier: Tier) -> list[Ticket]:
        """All that must be over before a work reads a unit's slots."""
        computed = self._readiness.computed() if tier is self._compute else []
        return [*self._under_way(ref, tier), *self._readiness.before_reading((ref, tier)), *computed]

    def _before_writing(self, ref: PlaneRef, tier: Tier) -> list[Ticket]:
        """All that must be over before a work writes a unit's slots, but for the fences of slots that have just been taken.

        What is computed is not among them: slots of the tier that computes have always just been taken.
        """
        return [*self._under_way(ref, tier), *self._readiness.before_writing((ref, tier))]

    def _under_way(self, ref: PlaneRef, tier: Tier) -> list[Ticket]:
        """The filling and the updates that must be over before a unit's slots are read or written."""
        chunks = [chunk for chunk in self.state.in_update.get(ref, ()) if self.state.updating[chunk] is tier]
        updates = [self._updates[chunk] for chunk in chunks if chunk in self._updates]
        filling = self._filling.get((ref, tier))
        return updates if filling is None else [filling, *updates]

    def _copy(self, ref: PlaneRef, src: Tier, dst: Tier) -> None:
        slots, nbytes = self.state.slots[ref], self.state.unit_bytes(ref)
        taken = dst is not Tier.DISK and ref not in self._at[dst]
        committed_slots = self.committed_slots
        if taken:
            self._take(ref, dst, slots)
        try:
            ticket = self._issue(ref, src, dst, taken=taken)
        except BaseException:
            if taken:  # the transfer has not been issued: the state knows nothing of it, and neither may the slots
                self._give(ref, dst, slots)
            raise
        self._tickets[ref, dst] = ticket
        self._readiness.read((ref, src), ticket)
        self._readiness.written((ref, dst), ticket)
        if dst is self._compute and self.committed_slots > committed_slots:
            self._fresh[ref] = self.committed_slots - committed_slots
        self._ledger.move(src, dst, nbytes)

    def _issue(self, ref: PlaneRef, src: Tier, dst: Tier, *, taken: bool) -> Ticket:
        """Issues a transfer, after what it has to come after. `taken`: whether its slots have just been taken."""
        slots, nbytes, lane = self.state.slots[ref], self.state.unit_bytes(ref), self._links.lane(src, dst)
        if dst is Tier.DISK:
            from_ = self._arenas[src].buffer(self._at[src][ref], slots)
            return lane.issue(self._pool().writing(ref, from_), self._before_reading(ref, src), nbytes=nbytes)
        first = self._at[dst][ref]
        before = self._arenas[dst].fences(first, slots)
        before += self._under_way(ref, dst) if taken else self._before_writing(ref, dst)
        if src is Tier.DISK:
            return lane.issue(self._pool().reading(ref, self._arenas[dst].buffer(first, slots)), before, nbytes=nbytes)
        if len(self.state.in_update.get(ref, ())) > 1:
            return self._issue_by_chunk(ref, src, dst, before)
        work = self._arenas[dst].copying(first, slots, self._arenas[src], self._at[src][ref])
        return lane.issue(work, [*before, *self._before_reading(ref, src)], nbytes=nbytes)

    def _issue_by_chunk(self, ref: PlaneRef, src: Tier, dst: Tier, before: list[Ticket]) -> Ticket:
        """Issues the transfer of a run as one of each chunk, so that none waits for updates of others."""
        lane, chunks = self._links.lane(src, dst), self._chunks(ref)
        slots, parts = self.state.slots[ref] // chunks, list[Ticket]()
        filling = self._filling.get((ref, src))
        for number in range(chunks):
            first, source_first = self._at[dst][ref] + number * slots, self._at[src][ref] + number * slots
            work = self._arenas[dst].copying(first, slots, self._arenas[src], source_first)
            update = self._updates.get(ref.chunk + number)
            # On a device an update that has been waited for is queued, and no more. The last one comes after all before it, and what was computed.
            after = self._readiness.before_reading((ref, src)) if update is None else [update]
            if filling is not None:
                after.append(filling)
            parts.append(lane.issue(work, [*before, *after], nbytes=slots * self.state.slot_bytes))
        return lane.issue(_nothing, parts)

    def _pool(self) -> DiskPool:
        assert self._disk is not None, "a plan moves units to a disk tier that does not exist"
        return self._disk


def _nothing() -> None:
    """The work of a ticket for what comes before it."""
