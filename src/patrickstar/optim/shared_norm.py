"""The global norm of gradients of which each of several ranks has some elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from patrickstar.core.norm_tree import BLOCK_NUMEL, ROW_NUMEL, BlockShare
from patrickstar.optim.masters import scaled_blocks
from patrickstar.optim.norm import GlobalNorm


class SharedNorm(GlobalNorm):
    """Adds up squares as `GlobalNorm` does, with its bits: this rank those of its elements, and all ranks the sums of each, in the same order.

    Args:
        rank: which this is. shares: of all ranks in the blocks of each tensor, in the order of tensors (`shares_by_rank`).
        gather: gives numbers of all ranks [p, n], each rank's in the order of its shares, of those [n] of this one.
    """

    def __init__(
        self,
        rank: int,
        shares: Sequence[Sequence[Sequence[BlockShare]]],
        gather: Callable[[Tensor], Tensor],
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device)
        self._shares = shares
        self._gather = gather
        self._own = iter([share for by_rank in shares for share in by_rank[rank]])

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
        area = self._squares[:BLOCK_NUMEL].zero_()
        at = share.start % BLOCK_NUMEL
        for block in scaled_blocks(part, factors):
            area[at : at + block.numel()].copy_(block)
            at += block.numel()
        rows = dict[int, Tensor]()
        for level, sums in enumerate(self._levels(area.square_(), 1, BLOCK_NUMEL // ROW_NUMEL)):
            # What a level's sums lie in is written over by the one after the next.
            rows |= {row: sums[0, row >> level].clone() for row, of in share.subtrees if of == level}
        self._numbers += [rows[row] for row, _ in share.subtrees]

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
        area = self._squares[:BLOCK_NUMEL].zero_()
        for share, sums in pieces:
            places = torch.tensor([row for row, _ in share.subtrees], device=area.device)
            area.view(-1, ROW_NUMEL).index_add_(0, places, sums.view(-1, ROW_NUMEL))
        return self._sums(area, 1, BLOCK_NUMEL // ROW_NUMEL)[0]
