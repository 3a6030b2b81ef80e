"""The peak of what torch's allocator has given out on a device: activations, gradients on their way and the workspaces of kernels."""

from __future__ import annotations

import torch

__all__ = ["DevicePeak"]


class DevicePeak:
    """Watches the allocator's own peak, which it only reads: whoever else reads or restarts it is not disturbed.

    It shows what is above all that has been before, on this device by anybody: less, where the user's own tensors had more.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base: int | None = None
        self._seen = 0

    def begin(self) -> None:
        """Begins, once, with what is allocated now."""
        if self._base is None:
            stats = torch.accelerator.memory_stats(self._device)
            self._base, self._seen = stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"]

    def short_of(self, nbytes: int) -> int:
        """The peak in bytes above what there was at first, if so many more than now were there."""
        return torch.accelerator.memory_allocated(self._device) + nbytes - (self._base or 0)

    def risen(self) -> int:
        """The peak in bytes above what there was at first, where it has risen since this was last asked for; 0 where it has not."""
        if self._base is None:
            return 0
        before, self._seen = self._seen, torch.accelerator.memory_stats(self._device)["allocated_bytes.all.peak"]
        return max(0, self._seen - self._base) if self._seen > before else 0
