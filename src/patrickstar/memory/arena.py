"""An arena: slots of one size in a space, taken and given back without any allocation in between.

What is resident is what is committed: a slot that was never taken has no pages, `trim` gives the pages of free slots back at once, and no page
straddles two slots. A slot may be given back while its last tenant's works are still under way: it then has fences, and whoever writes into it
next comes after them.

Note [Lent memory]
    Of slots of one and of several among each other, enough may be free and none side by side. Memory then has to go from some addresses to others. To
    take it away, works under way must have ended, and the host would wait for a device. Where a space can, the memory is mapped at the new addresses
    as well, with the fences of the old ones; and these are set apart until their works are over, when it is taken from them.

Callers take turns: an arena has no lock of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

import torch

from patrickstar.core.slots import SlotMap
from patrickstar.errors import StateError
from patrickstar.memory.lanes import Task, Ticket
from patrickstar.memory.space import HostSpace, Space

SLOT_ALIGNMENT = 4096  # bytes: slots are whole pages, and direct I/O on them needs it
_POISON = 0xFF  # a NaN in every floating type


class Arena:
    """Slots `[0, virtual_slots)` of `slot_bytes`. The addresses of all are reserved; only committed slots hold memory.

    Adjacent slots are adjacent in memory, so a run of them can be used as one tensor.

    `make_space`: makes `space`, the memory, given its bytes, those of a slot, and a name.
    """

    def __init__(
        self, slot_bytes: int, *, virtual_slots: int, name: str, make_space: Callable[..., Space] = HostSpace
    ) -> None:
        if slot_bytes < 1 or slot_bytes % SLOT_ALIGNMENT:
            raise ValueError(f"slots of {slot_bytes} bytes: expected a multiple of {SLOT_ALIGNMENT}")
        self.slot_bytes = slot_bytes
        self.virtual_slots = virtual_slots

        self._slots = SlotMap(virtual_slots)
        self.space = make_space(slot_bytes * virtual_slots, unit_bytes=slot_bytes, name=name)
        self._fences: dict[int, Ticket] = {}
        self._unprepared = bytearray(b"\1") * virtual_slots
        # Slots that are set apart, and what ends when they are not used any more.
        self._lent: dict[int, Ticket | None] = {}

    @property
    def committed_slots(self) -> int:
        """Slots that may hold pages: those in use, and free ones not trimmed since."""
        return self._slots.committed

    def take(self, n: int = 1, *, max_committed_slots: int | None = None) -> int:
        """The first of `n` adjacent free slots, now in use. The bytes in such slots are whatever was left there.

        What is written into them comes after `fences`.

        `max_committed_slots`: pages of other slots are given back before these get theirs, as `trim` does. See Note [Lent memory].

        Raises:
            DeviceError: there is no memory for them.
            LookupError: there is no such run of slots: the arena was made with too few virtual ones.
            StateError: the arena is closed, or belongs to another process.
        """
        self.space.expect_open()
        if self._lent:
            self._end_loans()
            if not self._slots.can_take(n):
                self._end_loans(waits=True)
        first = self._slots.take(n)
        try:
            if max_committed_slots is not None and self._slots.committed > max_committed_slots:
                if self.space.can_lend():
                    self._lend(max_committed_slots, range(first, first + n))
                else:
                    self.trim(max_committed_slots)
            for slot in range(first, first + n):
                if self._unprepared[slot]:
                    self.space.prepare(slot * self.slot_bytes, self.slot_bytes)
                    self._unprepared[slot] = 0
        except BaseException:
            self._slots.give(first, n)
            raise
        return first

    def fences(self, first: int, n: int = 1) -> list[Ticket]:
        """Tickets of what is still under way on `n` slots from `first` on, from before they were taken."""
        if not self._fences:
            return []
        found = [self._fences.pop(slot) for slot in range(first, first + n) if slot in self._fences]
        return [fence for fence in dict.fromkeys(found) if not fence.done]

    def give(self, first: int, n: int = 1, *, fence: Ticket | None = None) -> None:
        """Gives `n` slots from `first` on back: free again, with pages that stay until `trim`.

        `fence`: ends when nothing that was issued reads or writes them any more.
        """
        self._slots.give(first, n)
        if fence is not None and not fence.done:
            self._fences.update(dict.fromkeys(range(first, first + n), fence))

    def trim(self, max_committed_slots: int) -> None:
        """Gives the pages of free slots back to the system until at most `max_committed_slots` slots hold any, if that can be."""
        self._end_loans(waits=True)
        for slot in self._slots.trim(max_committed_slots):
            self._take_away(slot, self._fences)

    def _lend(self, max_committed_slots: int, to: range) -> None:
        """Gives the memory of free slots to those of `to` that have none, as far as the bound asks for that. See Note [Lent memory]."""
        needy = [slot for slot in to if self._unprepared[slot]]
        for slot in self._slots.trim(max_committed_slots):
            if not needy or self._unprepared[slot]:
                self._take_away(slot, self._fences)
                continue
            target = needy.pop()
            self.space.lend(slot * self.slot_bytes, target * self.slot_bytes)
            self._unprepared[target] = 0
            if slot in self._fences:
                self._fences[target] = self._fences[slot]
            self._lent[slot] = self._fences.pop(slot, None)
            self._slots.set_apart(slot)
        self._end_loans()

    def _end_loans(self, *, waits: bool = False) -> None:
        """Takes memory away from slots that are set apart and whose works are over, or are waited for."""
        for slot, fence in list(self._lent.items()):
            if waits or fence is None or fence.done:
                self._take_away(slot, self._lent)
                self._slots.put_back(slot)

    def _take_away(self, slot: int, fences: dict[int, Ticket] | dict[int, Ticket | None]) -> None:
        """Takes the memory of a slot away, when the works on it are over; it has no fence any more then."""
        fence = fences.get(slot)
        if fence is not None:
            with suppress(Exception):  # over, however it ended: whom that concerns is told by other tickets
                fence.wait()  # a late write would bring pages back
        fences.pop(slot, None)  # not before its wait, which an interruption may end
        # Where memory ran out when it was taken, it has none.
        if not self._unprepared[slot] and self.space.discard(slot * self.slot_bytes, self.slot_bytes):
            self._unprepared[slot] = 1

    def filling(self, first: int, n: int, *, poison: bool = False) -> Task:
        """A work: fills `n` slots with zeros; with `poison` every byte becomes 0xFF, so that a late reader is found out."""
        at, nbytes = self.place(first, n)
        return lambda: self.space.fill(at, nbytes, _POISON if poison else 0)

    def copying(self, first: int, n: int, source: Arena, source_first: int) -> Task:
        """A work: copies `n` slots of another arena into those from `first` on."""
        at, nbytes = self.place(first, n)
        from_, _ = source.place(source_first, n)
        return lambda: self.space.copy_from(source.space, from_, at, nbytes)

    def buffer(self, first: int, n: int = 1) -> memoryview:
        """The bytes of `n` slots, writable; page-aligned, so fit for direct I/O."""
        return self.space.buffer(*self.place(first, n))

    def wrapping(
        self, first: int, n: int, dtype: torch.dtype, *, part: slice | None = None
    ) -> Callable[[], torch.Tensor]:
        """A function that gives `n` slots, or some of their elements, as a flat tensor over a fresh storage.

        The death of a storage then tells that nothing made from it is left.
        """
        at, nbytes = self.place(first, n)
        if part is not None:
            at, nbytes = at + part.start * dtype.itemsize, (part.stop - part.start) * dtype.itemsize
        return self.space.wrapping(at, nbytes, dtype)

    def close(self, kept: Collection[torch.UntypedStorage] = ()) -> None:
        """Lets go of the memory. Pages of free slots go now, the others with the last tensor or buffer over the arena.

        `kept`: the storages over slots that somebody still has.
        """
        with suppress(StateError):  # closed before, or another process's
            self.space.expect_open()
            self.trim(0)
        self.space.close(kept)

    def place(self, first: int, n: int) -> tuple[int, int]:
        """The offset of slot `first` in the space, and the bytes of `n` slots. IndexError: there are no such slots."""
        if first < 0 or n < 1 or first + n > self.virtual_slots:
            raise IndexError(f"slots {first} to {first + n - 1} of an arena of {self.virtual_slots}")
        return first * self.slot_bytes, n * self.slot_bytes
