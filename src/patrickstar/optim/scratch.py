"""Bytes that passes take beside the planes: known beforehand, so that plans leave room for them on a device."""

from __future__ import annotations

from dataclasses import dataclass

from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.core.norm_tree import ROW_NUMEL, tree_rows

_LEAST_NUMEL = 1 << 10


@dataclass(frozen=True, slots=True)
class PassBytes:
    """The most bytes that passes take of the device where they run, beside what they are given: for the update of a chunk, and for a norm."""

    update: int = 0
    norm: int = 0


NONE = PassBytes()


def block_numel(numel: int, *, most: int) -> int:
    """Elements of so many that a pass takes at once on a device: a quarter, so that scratch is little beside the chunks, but no tiny blocks."""
    return min(most, max(_LEAST_NUMEL, numel // 4))


def tree_numel(numel: int, *, most: int) -> int:
    """Elements of the smallest tree of squares that has room for a tensor of so many, or the most that there are."""
    return min(most, ROW_NUMEL * tree_rows(max(1, numel)))


def triton_bytes(largest: int, tensors: int) -> PassBytes:
    """Bytes of Triton's passes, known without triton. A norm collects a block of 65,536 elements, and one launch sums 256 of them at most.

    `largest`: elements of the largest tensor, of so many.
    """
    blocks = max(1, -(-largest // 65_536))
    span = min(256, blocks)
    numbers = tensors * (2 + blocks // 256) * cuda_block_bytes(1)
    return PassBytes(norm=4 * 65_536 + cuda_block_bytes(span * 4_096) + cuda_block_bytes(span * 128) + 2 * numbers)
