"""Bytes that passes take beside the planes: known beforehand, so that plans leave room for them on a device."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NONE", "PassBytes", "block_numel", "grains", "tree_numel", "triton_bytes"]

_GRAIN_BYTES = 512  # what torch's allocator of a device gives out whole ones of
_LARGE_BYTES = (
    1 << 20
)  # from which on it leaves a rest of as much to a block (kSmallSize of c10/cuda/CUDACachingAllocator.cpp)

_LEAST_NUMEL = 1 << 10


@dataclass(frozen=True, slots=True)
class PassBytes:
    """The most bytes that passes take of the device where they run, beside what they are given: for the update of a chunk, and for a norm."""

    update: int = 0
    norm: int = 0


NONE = PassBytes()


def grains(nbytes: int) -> int:
    """The most bytes that an allocator of a device gives out for so many: of a large block it does not cut off a last MiB."""
    whole = -(-nbytes // _GRAIN_BYTES) * _GRAIN_BYTES
    return whole if whole <= _LARGE_BYTES else whole + _LARGE_BYTES


def block_numel(numel: int, *, most: int) -> int:
    """Elements of so many that a pass takes at once on a device: a quarter, so that scratch is little beside the chunks, but no tiny blocks."""
    return min(most, max(_LEAST_NUMEL, numel // 4))


def tree_numel(numel: int, *, most: int) -> int:
    """Elements of the smallest tree of squares that has room for a tensor of so many, or the most that there are."""
    return min(most, max(16, 1 << (numel - 1).bit_length()))


def triton_bytes(largest: int, tensors: int) -> PassBytes:
    """Bytes of Triton's passes, known without triton. A norm collects a block of 65,536 elements, and one launch sums 256 of them at most.

    `largest`: elements of the largest tensor, of so many.
    """
    blocks = max(1, -(-largest // 65_536))
    span = min(256, blocks)
    numbers = tensors * (2 + blocks // 256) * grains(1)
    return PassBytes(norm=4 * 65_536 + grains(span * 4_096) + grains(span * 128) + 2 * numbers)
