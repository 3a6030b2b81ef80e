"""A device that has failed: a kernel's error, which shows at whatever is done with the device next, and ends its use in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from patrickstar.errors import DeviceError


class DeviceFailureError(DeviceError):
    """A kernel has failed, of this library or of others. `shown`: torch's error, in words. `where`: what was done when it was noticed.

    Made from another one, it says the innermost place that is known.
    """

    def __init__(self, shown: object, where: str = "") -> None:
        if isinstance(shown, DeviceFailureError):
            where, shown = shown.where or where, shown.shown
        noticed = (
            where
            and f"\n  this was noticed at {where}; what failed came before that: CUDA_LAUNCH_BLOCKING=1 shows which kernel"
        )
        super().__init__(
            f"the device has failed: {shown}{noticed}\n  this process can use the device no more: start another, from the last checkpoint"
        )
        self.shown: str = str(shown)
        self.where: str = where


@contextmanager
def noticed_at(where: str) -> Iterator[None]:
    """Says where a failure of the device was noticed: what is done inside."""
    try:
        yield
    except (torch.AcceleratorError, DeviceFailureError) as error:
        raise DeviceFailureError(error, where) from error
