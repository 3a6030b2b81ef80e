"""Bytes that torch's allocator has given out on a device in the stretches of one session: activations, gradients on their way, workspaces of kernels.

The allocator counts for the whole process. So a session counts from what there was when its stretch began, up to its end, and not at all where
another session of the process has run meanwhile. What the user's own code makes inside of a stretch (its loss, say) is part of it.
"""

from __future__ import annotations

import weakref
from typing import ClassVar

import torch

from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.torch_private import allocated_bytes

__all__ = ["DevicePeak"]


class DevicePeak:
    """Watches the allocator's own peak, which it only reads: whoever else reads or restarts it is not disturbed.

    A peak shows where it is above all that has been before on this device; below that what is allocated when somebody looks.

    Attributes:
        most: the most bytes so far of this stretch, as far as that shows. is_seen: whether that was above all that has been before.
    """

    _last: ClassVar[
        dict[torch.device, weakref.ref[DevicePeak]]
    ] = {}  # of those that a stretch has begun for, by device

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts = False
        self._is_alone = True
        self._base = self._now = self._peak = 0
        self.most = 0
        self.is_seen = False

    def begin(self) -> None:
        """Begins a stretch, of which what is allocated now is no part."""
        self._give_up_last()
        self._last[self._device] = weakref.ref(self)
        self._base, self._peak = allocated_bytes(self._device)
        self._now = self.most = 0
        self.is_seen = False
        self._counts = self._is_alone = True

    def stop(self) -> None:
        """Ends the stretch: its activations are gone with the graph, and what is allocated from now on is no part of it."""
        self._counts, self._now = False, 0

    def _give_up_last(self) -> None:
        """Gives up the stretch of another session that is under way: this one allocates beside it."""
        last = self._last.get(self._device)
        other = None if last is None else last()
        if other is not None and other is not self and other._counts:
            other._counts = other._is_alone = False

    @property
    def now(self) -> int | None:
        """The bytes that there were when somebody last looked, 0 after the end of the stretch; None where these cannot be told from others'."""
        return self._now if self._is_alone else None

    def look(self) -> int | None:
        """The most bytes since somebody last looked, as far as that shows; None where they cannot be told from others'."""
        if not self._counts:
            if not self._is_alone:
                self._give_up_last()  # which has begun in the middle of this stretch
            return None
        allocated, peak = allocated_bytes(self._device)
        before, self._now = self._now, max(0, allocated - self._base)
        found = peak - self._base if peak > self._peak else max(before, self._now)
        self.is_seen = self.is_seen or peak > self._peak
        self._peak = peak
        self.most = max(self.most, found)
        return found

    def short_of(self, nbytes: int) -> int:
        """The bytes of this stretch, if a tensor of so many more than now were there."""
        return max(0, torch.accelerator.memory_allocated(self._device) - self._base) + cuda_block_bytes(nbytes)
