"""The tree of sums that a global norm is, and what of it each of several ranks has: torch-free, and the same on all of them.

A block, 65,536 elements of a tensor, is 4,096 rows of 16. Rows are added to their neighbours until one is left: each *subtree* is the sum of
2**level rows, from a multiple of that on. A rank that has some rows of a block has the sums of the largest subtrees in them. Where a cut goes
through a row, each rank has that row with zeros in place of what is another's. All of these in their places, and zeros elsewhere, have the block's
sum, bit for bit: a sum of squares and a zero is that sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from patrickstar.core.shard_layout import ShardLayout

BLOCK_NUMEL: Final = 65_536
"""Elements whose squares are summed by one tree, counted from the start of each tensor."""

ROW_NUMEL: Final = 16


class Subtree(NamedTuple):
    """The sum of the rows `[row, row + 2**level)` of a block, which is a row."""

    row: int
    level: int


@dataclass(frozen=True, slots=True)
class BlockShare:
    """The elements `[start, stop)` of a tensor that a rank has of one block, as `subtrees`; or whole blocks of it, without these.

    Of a cut block 16 numbers are known for each subtree, of a whole one a single number.
    """

    start: int
    stop: int
    subtrees: tuple[Subtree, ...] = ()

    @property
    def blocks(self) -> range:
        """The numbers of the blocks in their tensor."""
        return range(self.start // BLOCK_NUMEL, -(-self.stop // BLOCK_NUMEL))

    @property
    def sums(self) -> int:
        """Numbers that are known of it."""
        return ROW_NUMEL * len(self.subtrees) or len(self.blocks)


def subtrees(start: int, stop: int) -> tuple[Subtree, ...]:
    """The largest subtrees of the elements `[start, stop)` of a block, in their order; a row of which others are missing is one by itself."""
    found, row, end = list[Subtree](), start // ROW_NUMEL, -(-stop // ROW_NUMEL)
    first_whole, end_whole = -(-start // ROW_NUMEL), stop // ROW_NUMEL
    while row < end:
        level = 0
        if first_whole <= row < end_whole:
            while row % (2 << level) == 0 and row + (2 << level) <= end_whole:
                level += 1
        found.append(Subtree(row, level))
        row += 1 << level
    return tuple(found)


def tree_rows(numel: int) -> int:
    """Rows of the smallest tree that has so many elements: of zeros, in a larger one, nothing comes."""
    return 1 << (-(-numel // ROW_NUMEL) - 1).bit_length()


def block_shares(start: int, stop: int, *, numel: int) -> Iterator[BlockShare]:
    """The elements `[start, stop)` of a tensor of so many, by block. Zeros to the end of a last block's tree are of whoever has the last element."""
    while start < stop:
        block = start - start % BLOCK_NUMEL
        end = stop if stop == numel else stop - stop % BLOCK_NUMEL
        if start == block and start < end:
            yield BlockShare(start, end)
        else:
            end = min(block + BLOCK_NUMEL, stop)
            last = ROW_NUMEL * tree_rows(end - block) if end == numel else end - block
            yield BlockShare(start, end, subtrees(start - block, last))
        start = end


def shares_by_rank(layout: ShardLayout, name: str) -> list[list[BlockShare]]:
    """Shares of all ranks in a tensor's blocks, each rank's in the order of its parts."""
    found: list[list[BlockShare]] = [[] for _ in range(layout.size)]
    for rank, (_, start, stop, at) in layout.cut(name):
        found[rank] += block_shares(at, at + stop - start, numel=layout.slices[name].numel)
    return found
