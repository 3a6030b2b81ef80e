"""Blocks that torch's allocator of CUDA memory gives out: what a tensor takes of a device, which is more than its own bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

__all__ = ["block_bytes_on", "cuda_block_bytes", "exact_bytes"]

_GRAIN_BYTES: Final = 512  # kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp
_SMALL_BYTES: Final = 1 << 20  # kSmallSize there


def cuda_block_bytes(nbytes: int) -> int:
    """The most bytes of the block for a tensor of so many: whole grains, and above 1 MiB a rest of as much.

    A larger block that has become free is cut, so that the rest of it can be given to another, unless that rest is 1 MiB or less.
    """
    whole = -(-nbytes // _GRAIN_BYTES) * _GRAIN_BYTES
    return whole if whole <= _SMALL_BYTES else whole + _SMALL_BYTES


def exact_bytes(nbytes: int) -> int:
    """Bytes that a tensor takes where each is counted as it is: on the host, whose allocator `memory/allocator.py` describes."""
    return nbytes


def block_bytes_on(device_type: str) -> Callable[[int], int]:
    """Gives the function that says what a tensor of so many bytes takes of a device. `device_type`: as torch has it, "cuda" or "cpu"."""
    return cuda_block_bytes if device_type == "cuda" else exact_bytes
