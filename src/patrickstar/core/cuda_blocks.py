"""Blocks that torch's allocator of CUDA memory gives out: what a tensor takes of a device, which is more than its own bytes."""

from __future__ import annotations

from typing import Final

_GRAIN_BYTES: Final = 512  # kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp
_SMALL_BYTES: Final = 1 << 20  # kSmallSize there


def cuda_block_bytes(nbytes: int) -> int:
    """The most bytes of the block for a tensor of so many: whole grains, and above 1 MiB a rest of as much.

    A larger block that has become free is cut, so that the rest of it can be given to another, unless that rest is 1 MiB or less.
    """
    whole = -(-nbytes // _GRAIN_BYTES) * _GRAIN_BYTES
    return whole if whole <= _SMALL_BYTES else whole + _SMALL_BYTES


def block_bytes(nbytes: int, device_type: str) -> int:
    """The most bytes that a tensor of so many takes of a device; on the host its own. `device_type`: as torch has it, "cuda" or "cpu"."""
    return cuda_block_bytes(nbytes) if device_type == "cuda" else nbytes
