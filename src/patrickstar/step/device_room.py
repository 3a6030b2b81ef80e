"""The room on a device whose memory torch gives out. See `room.py`."""

from __future__ import annotations

import logging
import weakref
from functools import cache
from typing import ClassVar

import torch

from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.errors import BudgetError
from patrickstar.memory.store import ChunkStore
from patrickstar.plan.pilot import Pilot
from patrickstar.plan.stretch import Stretch, StretchKind
from patrickstar.step.budgets import Budgets
from patrickstar.step.known_forwards import KnownForward
from patrickstar.step.room import EmulatedRoom
from patrickstar.torch_private import allocated_bytes, attach_out_of_memory_observer
from patrickstar.units import format_bytes

_log = logging.getLogger("patrickstar")


class DeviceRoom(EmulatedRoom):
    """The room on a device whose memory torch gives out: the allocator's own count and peak, which are only read, say what is there.

    The allocator counts for the whole process. So a session counts from what there was when its stretch began, up to its end, and not at all where
    another session of the process has run meanwhile. What the user's own code makes inside of a stretch (its loss, say) is part of it. A peak shows
    where it is above all that has been before on this device; below that what is allocated when somebody looks.
    """

    always_meters = False
    _last: ClassVar[dict[torch.device, weakref.ref[DeviceRoom]]] = {}  # whose stretch began last, by device

    def __init__(self, pilot: Pilot, store: ChunkStore, budgets: Budgets) -> None:
        super().__init__(pilot, store, budgets)
        self._device = budgets.device
        _rooms().setdefault(self._device.index or 0, weakref.WeakSet()).add(self)

        self._counts = self._has_told = False
        self._is_alone = True
        self._base = self._now = self._peak = self._most = self._left = 0
        self._is_seen = False  # a peak of this stretch above all that has been before

    def begin(self, stretch: Stretch, there_bytes: int) -> None:  # noqa: ARG002
        """Begins a stretch, of which what else is allocated now is no part."""
        self._give_up_last()
        self._last[self._device] = weakref.ref(self)
        self._base, self._peak = allocated_bytes(self._device)
        self._base -= there_bytes
        self._now = self._most = self._left = 0
        self._is_seen = False
        self._counts = self._is_alone = True

    def _give_up_last(self) -> None:
        """Gives up the stretch of another session that is under way: this one allocates beside it."""
        last = self._last.get(self._device)
        other = None if last is None else last()
        if other is not None and other is not self and other._counts:
            other._counts = other._is_alone = False

    def look(self) -> None:
        """Notes what the allocator has given out since the last moment, and by how much that is more than was foreseen."""
        if self._counts:
            allocated, peak = allocated_bytes(self._device)
            before, self._now = self._now, max(0, allocated - self._base)
            found = peak - self._base if peak > self._peak else max(before, self._now)
            self._is_seen = self._is_seen or peak > self._peak
            self._peak = peak
            self._most = max(self._most, found)
            self._store.hold_beside(self.kept_bytes + found)
            self._store.hold_beside(self.kept_bytes + self._now)  # what was there in between is there no more
            stretch = self._pilot.stretch
            if stretch.followed is not None and stretch.position:
                stretch.exceed(found - stretch.followed.foreseen.moments[stretch.position - 1].nonmodel_bytes)
        elif not self._is_alone:
            self._give_up_last()  # which has begun in the middle of this stretch

    def pause_meter(self) -> None:
        """Stops counting: activations are gone with the graph, and whoever allocates now does so for himself."""
        super().pause_meter()
        self._left = max(self._left, self._now)
        self._counts, self._now = False, 0

    def beside_bytes(self) -> int:
        """Bytes that there were when somebody last looked; as for other rooms where these cannot be told from others'."""
        return self._now if self._is_alone else super().beside_bytes()

    @property
    def is_measured(self) -> bool:
        """True where the allocator's bytes are those of this session."""
        return self._is_alone or super().is_measured

    def end(self, stretch: Stretch, known: KnownForward | None, *, budget_bytes: int) -> None:
        """Plans with what a stretch has taken, from now on, where that is more than was foreseen; more than was left for it is said."""
        share, most, excess = self._budgets.machine.costs.set_aside_bytes, self._most, 0
        trace = None if known is None else known.expected.trace
        if known is None or trace is None:
            excess = most - self.level_bytes
        elif stretch.foreseen is None:
            excess = known.expected.excess_bytes = max(0, most - trace.peak)
        else:
            # Moments of a plan that was left, or of none, do not tell by how much.
            is_told, beside = not stretch.reason and stretch.gradient_bytes is None, stretch.gradient_bytes or 0
            excess = max(stretch.excess_bytes, 0 if is_told else most - stretch.foreseen.peak - beside)
            known.expected.excess_bytes = max(known.expected.excess_bytes, known.expected.excess_beyond(share) + excess)
        left = 0 if known is not None and known.expected.knows_workspaces else share
        shows = left and stretch.complete and self._is_seen
        if shows and known is not None and trace is not None and not known.by_chance:
            known.expected.knows_workspaces = True
            # Later steps begin with it. Outputs that the user holds may be counted as well, within the share.
            self.kept_bytes += max(0, min(self._left, share - known.expected.excess_bytes - self.kept_bytes))
        if excess > left:
            budget, is_over = format_bytes(budget_bytes), self._store.ledger.peak[self._compute] > budget_bytes
            _log.log(
                logging.INFO if self._has_told else logging.WARNING,
                "activations and workspaces took %s of the device in the %s, %s more at some op than its plan left them: plans are made anew, with "
                "more room for them%s",
                *(format_bytes(most), stretch.kind, format_bytes(excess)),
                f". In this one, chunks and they took more than the device_memory of {budget}" if is_over else "",
            )
            self._has_told = True
        self.rise(most)

    def leave_room(self, nbytes: int) -> int:
        """Leaves room from the next stretch on for so many bytes more than are there now; gives the bytes that lie beside chunks then."""
        self.rise(max(0, torch.accelerator.memory_allocated(self._device) - self._base) + cuda_block_bytes(nbytes))
        return self.level_bytes

    def __call__(self, asked_bytes: int, free_bytes: int, total_bytes: int) -> None:
        """Raises BudgetError in the place of torch's error, where a forward or backward of this session finds no memory on the device."""
        stretch, store, tier = self._pilot.stretch, self._store, self._compute
        if stretch.is_over or stretch.kind not in {StretchKind.TRAINING, StretchKind.EVALUATION}:
            return
        slots = store.units.committed_slots * store.state.slot_bytes
        allocated = torch.accelerator.memory_allocated(self._device)
        others = max(0, total_bytes - free_bytes - slots - torch.accelerator.memory_reserved(self._device))
        position = max(0, stretch.position - 1)
        moment = f"{position} {stretch.kind}" if stretch.trace is None else stretch.trace.name(position)
        leaves = self.leave_room(asked_bytes)
        needed, budget = slots + allocated + asked_bytes, self._budgets.machine.given(tier)
        raise BudgetError(
            f"the device has no memory for {format_bytes(asked_bytes)} more after op {moment}, although {tier.label}_memory is "
            f"{format_bytes(budget)}: of {format_bytes(total_bytes)} {format_bytes(free_bytes)} are free, chunk slots have "
            f"{format_bytes(slots)}, torch's allocator has {format_bytes(allocated)} in use, and others {format_bytes(others)}\n"
            f"  the next step leaves {format_bytes(leaves)} to activations; give a smaller {tier.label}_memory or a smaller batch, or end "
            "other programs on the device",
            tier=tier.label,
            moment=moment,
            needed_bytes=needed,
            available_bytes=slots + allocated + free_bytes,
        )


@cache
def _rooms() -> dict[int, weakref.WeakSet[DeviceRoom]]:
    """Rooms by number of the device, told of tensors it has no memory for. torch lets go of no observer: one of ours is in a process, for good."""
    found: dict[int, weakref.WeakSet[DeviceRoom]] = {}

    def tell(device: int, asked_bytes: int, total_bytes: int, free_bytes: int) -> None:
        for room in list(found.get(device, ())):
            room(asked_bytes, free_bytes, total_bytes)

    attach_out_of_memory_observer(tell)
    return found
