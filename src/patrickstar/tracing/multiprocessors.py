"""Multiprocessors of a device: kernels that divide their work among them take scratch for each."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["count_multiprocessors"]

_OF_ANOTHER: Final = 132  # of a GPU that is not here: those of an H100


def count_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; of an H100 where the device is not one of CUDA."""
    if device.type != "cuda":
        return _OF_ANOTHER
    return torch.cuda.get_device_properties(device).multi_processor_count
