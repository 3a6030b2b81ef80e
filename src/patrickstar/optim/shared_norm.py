"""The global norm of gradients of which each of several ranks has some elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.core.norm_tree import BLOCK_NUMEL, ROW_NUMEL, BlockShare, shares_by_rank, tree_rows
from patrickstar.core.shard_layout import ShardLayout
from patrickstar.optim.masters import scaled_blocks
from patrickstar.optim.norm import GlobalNorm


class SharedNorm(GlobalNorm):
    """Adds up squares as `GlobalNorm` does, with its bits: this rank those of its elements, and all ranks the sums of each, in the same order.

    Args:
        rank: which this is. shares: of all ranks in the blocks of each tensor, in the order of tensors (`shares_by_rank`).
        gather: gives numbers of all ranks [p, n], each rank's in the order of its shares, of those [n] of this one.
        device, largest: as `GlobalNorm` has them.
    """

    def __init__(
        self,
        rank: int,
        shares: Sequence[Sequence[Sequence[BlockShare]]],
        gather: Callable[[Tensor], Tensor],
        device: torch.device | str | None = None,
        *,
        largest: int | None = None,
    ) -> None:
        super().__init__(device, largest=largest)
        self._shares = shares
        self._gather = gather
        self._own = iter([share for by_rank in shares for share in by_rank[rank]])

    @staticmethod
    def bytes_of(layout: ShardLayout) -> int:
        """The most bytes that a norm of all tensors takes of a device."""
        own = (share for name in layout.slices for share in shares_by_rank(layout, name)[layout.rank])
        cuts = [8 * ROW_NUMEL * len(share.subtrees) for share in own if share.subtrees]
        sums = sum(map(cuda_block_bytes, cuts)) + 2 * cuda_block_bytes(sum(cuts))  # each by itself, then all together
        return GlobalNorm.scratch_bytes(layout.largest_numel, len(layout.slices)) + sums

    @torch.no_grad()
    def add(self, piece: Tensor, factors: Sequence[Tensor] = ()) -> None:
        """Takes this rank's next part of the current tensor."""
        at = 0
        while at < piece.numel():
            share = next(self._own)
            part = piece[at : at + share.stop - share.start]
            if share.subtrees:
                self._add_cut(share, part, factors)
            else:
                super().add(part, factors)
                self.end_tensor()
            at += part.numel()

    def _add_cut(self, share: BlockShare, part: Tensor, factors: Sequence[Tensor]) -> None:
        at = share.start % BLOCK_NUMEL
        rows = tree_rows(at + part.numel())
        area = self._squares[: rows * ROW_NUMEL].zero_()
        found = area.new_empty(len(share.subtrees), ROW_NUMEL)
        for block in scaled_blocks(part, factors):
            area[at : at + block.numel()].copy_(block)
            at += block.numel()
        for level, sums in enumerate(self._levels(area.square_(), 1, rows)):
            for number, (row, of) in enumerate(share.subtrees):
                if of == level:  # what they lie in is written over by the level after the next
                    found[number].copy_(sums[0, row >> level])
        self._numbers.append(found.view(-1))

    def numbers(self) -> Tensor:
        """The sums of all blocks of all ranks, which all wait for."""
        mine = super().numbers()
        if not self._shares:
            return mine
        totals = [sum(share.sums for share in chain(*of_rank)) for of_rank in zip(*self._shares, strict=True)]
        left = list(self._gather(torch.cat([mine, mine.new_zeros(max(totals) - mine.numel())])))
        found = []
        for by_rank in self._shares:
            n_blocks = max((share.blocks.stop for share in chain(*by_rank)), default=0)
            numbers, cut = mine.new_zeros(n_blocks), dict[int, list[tuple[BlockShare, Tensor]]]()
            for rank, shares in enumerate(by_rank):
                *known, left[rank] = left[rank].tensor_split(tuple(accumulate(share.sums for share in shares)))
                for share, sums in zip(shares, known, strict=True):
                    if share.subtrees:
                        cut.setdefault(share.blocks.start, []).append((share, sums))
                    else:
                        numbers[share.blocks.start : share.blocks.stop] = sums
            for block, pieces in cut.items():
                numbers[block] = self._whole(pieces)
            found.append(numbers)
        return torch.cat(found)

    def _whole(self, pieces: Sequence[tuple[BlockShare, Tensor]]) -> Tensor:
        """The sum of a block, of which ranks have the sums of subtrees."""
        rows = max(row + (1 << level) for share, _ in pieces for row, level in share.subtrees)
        area = self._squares[: rows * ROW_NUMEL].zero_()
        for share, sums in pieces:
            places = torch.tensor([row for row, _ in share.subtrees], device=area.device)
            area.view(-1, ROW_NUMEL).index_add_(0, places, sums.view(-1, ROW_NUMEL))
        return self._sums(area, 1, rows)[0]
