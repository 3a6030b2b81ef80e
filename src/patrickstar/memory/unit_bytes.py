"""The places of units' bytes: slots of an arena on each tier that is memory, and extents of the disk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from patrickstar.core.ledger import Ledger
from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.memory.arena import Arena
from patrickstar.memory.disk import DiskPool
from patrickstar.memory.lanes import Task, Ticket
from patrickstar.plan.actions import Issue
from patrickstar.plan.residency import InvariantError, Residency


@dataclass(eq=False, kw_only=True)
class UnitBytes:
    """Takes slots and extents for units, gives them back, and makes the works that move their bytes. When, it does not ask.

    Attributes:
        state: where every unit is; only read here.
        arenas: an arena for each memory tier in use; disk: the disk tier, or None. dtype: the torch type of a unit's elements.
        ledger: is told of every slot taken and given back; what rests below the compute tier is in it.
        slots_here: the first slot of each unit on the compute tier.
        committed_slots: slots of the compute tier that may hold pages now. limit_slots: how many may, those in use and those kept warm.
    """

    state: Residency
    arenas: Mapping[Tier, Arena]
    disk: DiskPool | None
    dtype: Callable[[PlaneRef], torch.dtype]
    ledger: Ledger

    committed_slots: int = field(default=0, init=False)
    limit_slots: int = field(init=False)

    def __post_init__(self) -> None:
        self._compute = self.state.compute
        self.limit_slots = self.arenas[self._compute].virtual_slots
        self._at: dict[Tier, dict[PlaneRef, int]] = {tier: {} for tier in self.arenas}
        self._inherited: set[PlaneRef] = set()
        self.slots_here: Mapping[PlaneRef, int] = self._at[self._compute]

    def has_slots(self, ref: PlaneRef, tier: Tier) -> bool:
        """Tells whether a unit has slots on a tier that is memory, those in which it rests included."""
        return ref in self._at[tier]

    def take(self, ref: PlaneRef, tier: Tier, slots: int) -> None:
        """Takes slots for a unit."""
        arena = self.arenas[tier]
        limit = self.limit_slots if tier is self._compute else None
        self._at[tier][ref] = arena.take(slots, max_committed_slots=limit)
        if tier is self._compute:
            self.committed_slots = arena.committed_slots
        if tier is self._compute or self.state.has_slots_to_take(ref, tier):
            self.ledger.add(tier, slots * arena.slot_bytes)

    def give(self, ref: PlaneRef, tier: Tier, slots: int, *, fence: Ticket | None) -> None:
        """Gives a unit's slots back. `fence`: ends when nothing that was issued uses them any more."""
        arena = self.arenas[tier]
        if tier is self._compute and ref in self._inherited:
            self._inherited.discard(ref)
            arena.space.inherit(*arena.place(self._at[tier][ref], slots), inherited=False)
        arena.give(self._at[tier].pop(ref), slots, fence=fence)
        if tier is self._compute or self.state.has_slots_to_take(ref, tier):
            self.ledger.remove(tier, slots * arena.slot_bytes)

    def fences(self, ref: PlaneRef, tier: Tier, slots: int) -> list[Ticket]:
        """Tickets of what is still under way on a unit's slots, from before they were taken."""
        return self.arenas[tier].fences(self._at[tier][ref], slots)

    def absent_bytes(self, ref: PlaneRef) -> int:
        """Bytes of a unit's slots on the compute tier whose pages have not come yet. It takes a call of the system."""
        arena = self.arenas[self._compute]
        return arena.space.absent_bytes(*arena.place(self.slots_here[ref], self.state.slots[ref]))

    def trim(self) -> None:
        """Gives pages of free slots back to the system until no more than `limit_slots` hold any, if that can be."""
        if self.committed_slots > self.limit_slots:
            self.arenas[self._compute].trim(self.limit_slots)
            self.committed_slots = self.arenas[self._compute].committed_slots

    def close(self, kept: Collection[torch.UntypedStorage]) -> None:
        """Gives everything back. `kept`: the storages over slots of the compute tier that somebody still has."""
        with ExitStack() as ends:  # each is closed, whatever another raises
            if self.disk is not None:
                ends.callback(self.disk.close)
            for tier, arena in self.arenas.items():
                ends.callback(arena.close, kept if tier is self._compute else ())

    def prepare(self, homes: Mapping[PlaneRef, Tier], slots: Mapping[PlaneRef, int]) -> None:
        """Sets aside on the disk what `rest` will need. DeviceError, BudgetError: the disk has no room; nothing has changed then."""
        units = {ref: slots[ref] * self.state.slot_bytes for ref, tier in homes.items() if tier is Tier.DISK}
        if units:
            self._pool().add(units)

    def rest(self, ref: PlaneRef, tier: Tier, slots: int) -> None:
        """Has a unit rest on a tier from now on."""
        if tier is not self._compute:
            self.ledger.add(tier, slots * self.state.slot_bytes)
        if tier is Tier.DISK:
            self._pool().take(ref)

    def wrapping(self, ref: PlaneRef, tier: Tier, part: slice | None = None) -> Callable[[], Tensor]:
        """A function that gives a unit's slots, or some of its elements, as a 1-D tensor over a fresh storage."""
        first = self._at[tier].get(ref)
        if first is None:
            raise InvariantError(1, f"{ref} is used on the {tier.label}, without slots")
        return self.arenas[tier].wrapping(first, self.state.slots[ref], self.dtype(ref), part=part)

    def part(self, ref: PlaneRef, part: slice) -> Tensor:
        """Elements of a unit on the compute tier, over a fresh storage of their own. Forked children inherit them, until the slots are given back."""
        if ref not in self._inherited:
            self._inherited.add(ref)
            arena = self.arenas[self._compute]
            arena.space.inherit(*arena.place(self.slots_here[ref], self.state.slots[ref]), inherited=True)
        return self.wrapping(ref, self._compute, part)()

    def moving(self, issue: Issue) -> Task:
        """The work of a copy or a creation."""
        (_, ref, tier), src, slots = issue.work, issue.src, issue.slots
        if tier is Tier.DISK and src is not None:
            return self._pool().writing(ref, self.arenas[src].buffer(self._at[src][ref], slots))
        arena, first = self.arenas[tier], self._at[tier][ref]
        if src is None:
            return arena.filling(first, slots)
        if src is Tier.DISK:
            return self._pool().reading(ref, arena.buffer(first, slots))
        return arena.copying(first, slots, self.arenas[src], self._at[src][ref])

    def copying(self, ref: PlaneRef, src: Tier, dst: Tier, span: range) -> Task:
        """The work of copying these of a unit's slots, counted from its first, from one tier that is memory to another."""
        first, source_first = self._at[dst][ref] + span.start, self._at[src][ref] + span.start
        return self.arenas[dst].copying(first, len(span), self.arenas[src], source_first)

    def poisoning(self, ref: PlaneRef, tier: Tier, slots: int) -> Task:
        """The work of making a unit's slots such that a late reader is found out."""
        return self.arenas[tier].filling(self._at[tier][ref], slots, poison=True)

    def _pool(self) -> DiskPool:
        assert self.disk is not None, "a plan moves units to a disk tier that does not exist"
        return self.disk
