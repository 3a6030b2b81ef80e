"""The chunk store: the only one that moves bytes, and it does so only as actions say.

Where a unit's bytes are on a tier is a slot of that tier's arena, or an extent of the disk pool. What may be trusted where is the matter of
`plan/residency.py`; the store carries out the same actions on the same units, and holds no opinion.

    Create   slots are taken and filled with zeros
    Copy     slots are taken where the copy arrives; the bytes follow; a ticket is kept
    Wait     the ticket's wait: from now on the copy holds the bytes
    Drop     the slots are given back, poisoned where asked for
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from patrickstar.core.ledger import Ledger
from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.memory.arena import Arena
from patrickstar.memory.disk import DiskPool
from patrickstar.memory.lanes import CompletedTicket
from patrickstar.memory.payload import InFlight, Payload, Released, Resident, readable_on
from patrickstar.plan.actions import Action, Copy, Create, Drop, Wait
from patrickstar.plan.residency import InvariantError

__all__ = ["ChunkStore"]


class ChunkStore:
    """Slots and extents of every unit, and the bytes in them.

    Args:
        arenas: an arena for each memory tier in use; disk: the disk tier, or None.
        home: where each unit rests; what rests below the compute tier is in the ledger already.
        slots: slots a unit takes. dtype: torch type of a unit's elements.
        ledger: is told of every slot taken and given back, and of every byte that crosses a link.
        compute: the tier that computes. poison: whether slots given back are filled with NaN.

    Attributes:
        limit_slots: how many slots of the compute tier may hold pages now, those in use and those kept warm.
    """

    def __init__(
        self,
        *,
        arenas: Mapping[Tier, Arena],
        disk: DiskPool | None,
        home: Mapping[PlaneRef, Tier],
        slots: Mapping[PlaneRef, int],
        dtype: Callable[[PlaneRef], torch.dtype],
        ledger: Ledger,
        compute: Tier,
        poison: bool = False,
    ) -> None:
        self._arenas = arenas
        self._disk = disk
        self._home = home
        self._slots = slots
        self._dtype = dtype
        self._ledger = ledger
        self._compute = compute
        self._poison = poison

        self.limit_slots = arenas[compute].virtual_slots
        self._at: dict[Tier, dict[PlaneRef, int]] = {tier: {} for tier in arenas}
        self._in_flight: dict[tuple[PlaneRef, Tier], InFlight] = {}

    def dtype(self, ref: PlaneRef) -> torch.dtype:
        """torch's type of a unit's elements."""
        return self._dtype(ref)

    @property
    def committed_slots(self) -> int:
        """Slots of the compute tier that may hold pages now."""
        return self._arenas[self._compute].committed_slots

    def carry_out(self, action: Action) -> None:
        """Does what the action says. DeviceError where the disk does not do its work; nothing is lost by that."""
        match action:
            case Create(ref, tier, slots):
                if ref not in self._at[tier]:  # at home it may have rested before
                    self._take(ref, tier, slots)
                buffer = self._buffer(ref, tier)
                ctypes.memset(_address(buffer), 0, len(buffer))
            case Copy(ref, src, dst, _):
                self._copy(ref, src, dst)
            case Wait(ref, tier):
                self._in_flight.pop((ref, tier)).ticket.wait()
            case Drop(ref, tier, slots):
                self._give(ref, tier, slots)

    def tensor(self, ref: PlaneRef, tier: Tier) -> Tensor:
        """A 1-D tensor over a fresh storage of the unit's slots on a memory tier.

        Raises:
            InvariantError: the bytes are not there, or still on their way.
        """
        payload = self.payload(ref, tier)
        if not readable_on(payload, tier):
            raise InvariantError(1, f"{ref} is used on the {tier.label}, where it is {type(payload).__name__}")
        return self._arenas[tier].tensor(self._at[tier][ref], self._slots[ref], self._dtype(ref))

    def payload(self, ref: PlaneRef, tier: Tier) -> Payload:
        """What is true of the unit's bytes on a memory tier."""
        on_its_way = self._in_flight.get((ref, tier))
        if on_its_way is not None:
            return on_its_way
        slot = self._at[tier].get(ref)
        return Released() if slot is None else Resident(tier, slot, self._slots[ref])

    def leave_home(self, ref: PlaneRef) -> None:
        """A unit without contents gives the slots back in which it rests on a memory tier: it is going to have another size."""
        for tier, places in self._at.items():
            if ref in places:
                self._arenas[tier].give(places.pop(ref), self._slots[ref], poison=self._poison)

    def add_to_disk(self, units: Mapping[PlaneRef, int]) -> None:
        """Units get extents of so many bytes, or other ones, from their `take_place` on."""
        if units:
            self._pool().add(units)

    def take_place(self, ref: PlaneRef) -> None:
        """A unit without contents rests on the disk, in its new extent."""
        self._pool().take(ref)

    @property
    def has_disk(self) -> bool:
        """Whether anything rests on a disk."""
        return self._disk is not None

    def close(self) -> None:
        """Gives everything back. What still refers to a slot keeps its memory."""
        for arena in self._arenas.values():
            arena.close()
        if self._disk is not None:
            self._disk.close()

    def trim(self) -> None:
        """Gives pages of free slots back to the system until no more than `limit_slots` hold any."""
        self._arenas[self._compute].trim(self.limit_slots)

    def _take(self, ref: PlaneRef, tier: Tier, slots: int) -> None:
        self._at[tier][ref] = self._arenas[tier].take(slots)
        if tier is self._compute:
            self.trim()  # now, before the new slots' pages are touched
        if not self._is_reserved(ref, tier):
            self._ledger.add(tier, slots * self._arenas[tier].slot_bytes)

    def _give(self, ref: PlaneRef, tier: Tier, slots: int) -> None:
        self._arenas[tier].give(self._at[tier].pop(ref), slots, poison=self._poison)
        if not self._is_reserved(ref, tier):
            self._ledger.remove(tier, slots * self._arenas[tier].slot_bytes)

    def _is_reserved(self, ref: PlaneRef, tier: Tier) -> bool:
        return tier is not self._compute and self._home[ref] is tier

    def _buffer(self, ref: PlaneRef, tier: Tier) -> memoryview:
        return self._arenas[tier].buffer(self._at[tier][ref], self._slots[ref])

    def _copy(self, ref: PlaneRef, src: Tier, dst: Tier) -> None:
        taken = dst is not Tier.DISK and ref not in self._at[dst]
        if taken:
            self._take(ref, dst, self._slots[ref])
        try:
            if dst is Tier.DISK:
                ticket = self._pool().write(ref, self._buffer(ref, src))
            elif src is Tier.DISK:
                ticket = self._pool().read(ref, self._buffer(ref, dst))
            else:
                source, target = self._buffer(ref, src), self._buffer(ref, dst)
                ctypes.memmove(_address(target), _address(source), len(source))
                ticket = CompletedTicket()
        except BaseException:
            if taken:  # the transfer has not been issued: the state knows nothing of it, and neither may the slots
                self._give(ref, dst, self._slots[ref])
            raise
        self._in_flight[ref, dst] = InFlight(ticket, src, dst, self._at[src if dst is Tier.DISK else dst][ref])
        self._ledger.move(src, dst, self._slots[ref] * self._arenas[src if dst is Tier.DISK else dst].slot_bytes)

    def _pool(self) -> DiskPool:
        assert self._disk is not None, "a plan moves units to a disk tier that does not exist"
        return self._disk


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
