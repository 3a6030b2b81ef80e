"""The global norm of gradients, of which each of several ranks may have some elements, and the factor that clips it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import accumulate, chain
from operator import add

import torch

from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.core.norm_tree import BLOCK_NUMEL, ROW_NUMEL, BlockShare, shares_by_rank, tree_rows
from patrickstar.core.shard_layout import ShardLayout
from patrickstar.optim.masters import scaled_blocks

_MOST_NUMEL = (
    4 * BLOCK_NUMEL
)  # summed at once: 12 bytes of scratch an element, 3 MiB; more are faster only by more threads


class GlobalNorm:
    """Adds up squares tensor by tensor, so that no two gradients need be in memory at once. `docs/bits.md` has the definition.

    Squares are taken in fp64, where those of fp32 numbers are exact. A block of 65,536 elements, zeros in place of those that a tensor's last
    one lacks, is 4,096 rows of 16: rows are added to their neighbours (0 and 1, 2 and 3), pairs to theirs, until one is left, and then its
    halves, until one number is. The numbers of all blocks are added left to right, and the root of that is rounded to fp32 once. Each sum has
    its place, so no number of threads, instruction set, kernel or device changes a bit. A tensor comes in the order in which it lies in memory,
    in pieces of any length: the result depends on the tensors alone.

    `device`: where squares are taken. The host waits for it once, for the result. `largest`: elements of the largest tensor, if that is known: no
    more than it needs is taken for its squares.
    """

    def __init__(self, device: torch.device | str | None = "cpu", *, largest: int | None = None) -> None:
        self._device = torch.device(device or "cpu")
        self._filled = 0
        self._numbers: list[torch.Tensor] = []
        self._take_scratch(largest)

    def _take_scratch(self, largest: int | None) -> None:
        numel = _MOST_NUMEL if largest is None else _tree_numel(largest)
        self._squares = torch.empty(numel, dtype=torch.float64, device=self._device)
        self._scratch = torch.empty(numel // 2, dtype=torch.float64, device=self._device)
        self._has_cut = False  # a block, which ends a tensor

    @torch.no_grad()
    def add(self, piece: torch.Tensor, factors: Sequence[torch.Tensor] = ()) -> None:
        """Takes the next elements of the current tensor, a flat piece, multiplied with the factors in their order (0-dim fp32)."""
        assert piece.dim() == 1, f"a piece must be flat, not {tuple(piece.shape)}"
        for block in scaled_blocks(piece, factors):
            assert not (self._has_cut and block.numel()), f"a tensor of more elements than {len(self._squares)}"
            start = 0
            while start < block.numel():
                taken = min(block.numel() - start, len(self._squares) - self._filled)
                self._squares[self._filled : self._filled + taken].copy_(block[start : start + taken])
                self._filled += taken
                start += taken
                if self._filled == len(self._squares):
                    self._sum()

    def end_tensor(self) -> None:
        """Ends the current tensor: the next piece starts another one, with a block of its own."""
        if self._filled:
            self._sum()
        self._has_cut = False

    def numbers(self) -> torch.Tensor:
        """The sums of all blocks so far, 1-D in fp64, where they were taken: `norm_of` them is the norm."""
        assert not self._filled, "inside a tensor: end_tensor() first"
        return torch.cat(self._numbers) if self._numbers else torch.empty(0, dtype=torch.float64, device=self._device)

    @staticmethod
    def scratch_bytes(largest: int, tensors: int) -> int:
        """The most bytes that a norm of so many tensors takes of a device, the largest of so many elements."""
        numel = _tree_numel(largest)
        # The block before is there until the next one is made.
        scaled = min(largest, BLOCK_NUMEL), min(max(0, largest - BLOCK_NUMEL), BLOCK_NUMEL)
        # Blocks are added up in groups, whose numbers are kept.
        groups = tensors * (2 + largest // _MOST_NUMEL)
        taken = 8 * numel, 4 * numel, 8 * groups, *(4 * block for block in scaled)
        return sum(map(cuda_block_bytes, taken)) + (groups + 3) * cuda_block_bytes(1)

    def _sum(self) -> None:
        """Adds the blocks that have come to the total, the last one as it is."""
        filled, self._filled = self._filled, 0
        blocks, rest = divmod(filled, BLOCK_NUMEL)
        if blocks:
            squares = self._squares[: blocks * BLOCK_NUMEL].square_()
            self._numbers.append(self._sums(squares, blocks, BLOCK_NUMEL // ROW_NUMEL))
        self._has_cut = bool(rest)
        if rest:
            # Rows of zeros add nothing: a tree of fewer rows has the same sum.
            rows = tree_rows(rest)
            squares = self._squares[blocks * BLOCK_NUMEL :][: rows * ROW_NUMEL]
            squares[rest:].zero_()
            self._numbers.append(self._sums(squares.square_(), 1, rows))

    def _sums(self, squares: torch.Tensor, blocks: int, rows: int) -> torch.Tensor:
        """The sums of some blocks of so many rows each, a power of two."""
        *_, left = self._levels(squares, blocks, rows)
        sums = left[:, 0]
        while sums.shape[1] > 1:
            width = sums.shape[1] // 2
            sums = sums[:, :width] + sums[:, width:]
        return sums[:, 0].clone()  # what it is a part of is written over

    def _levels(self, squares: torch.Tensor, blocks: int, rows: int) -> Iterator[torch.Tensor]:
        """The rows of each block's tree: the squares, then ever half as many, until one is left. The ones after the next lie where these did."""
        left, into, other = squares.view(blocks, rows, ROW_NUMEL), self._scratch, squares
        yield left
        while rows > 1:
            rows //= 2
            half = into[: blocks * rows * ROW_NUMEL].view(blocks, rows, ROW_NUMEL)
            torch.add(left[:, 0::2], left[:, 1::2], out=half)
            left, into, other = half, other, into
            yield left


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
        gather: Callable[[torch.Tensor], torch.Tensor],
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
    def add(self, piece: torch.Tensor, factors: Sequence[torch.Tensor] = ()) -> None:
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

    def _add_cut(self, share: BlockShare, part: torch.Tensor, factors: Sequence[torch.Tensor]) -> None:
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

    def numbers(self) -> torch.Tensor:
        """The sums of all blocks of all ranks, which all wait for."""
        mine = super().numbers()
        if not self._shares:
            return mine
        totals = [sum(share.sums for share in chain(*of_rank)) for of_rank in zip(*self._shares, strict=True)]
        left = list(self._gather(torch.cat([mine, mine.new_zeros(max(totals) - mine.numel())])))
        found = []
        for by_rank in self._shares:
            n_blocks = max((share.blocks.stop for share in chain(*by_rank)), default=0)
            numbers, cut = mine.new_zeros(n_blocks), dict[int, list[tuple[BlockShare, torch.Tensor]]]()
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

    def _whole(self, pieces: Sequence[tuple[BlockShare, torch.Tensor]]) -> torch.Tensor:
        """The sum of a block, of which ranks have the sums of subtrees."""
        rows = max(row + (1 << level) for share, _ in pieces for row, level in share.subtrees)
        area = self._squares[: rows * ROW_NUMEL].zero_()
        for share, sums in pieces:
            places = torch.tensor([row for row, _ in share.subtrees], device=area.device)
            area.view(-1, ROW_NUMEL).index_add_(0, places, sums.view(-1, ROW_NUMEL))
        return self._sums(area, 1, rows)[0]


def _tree_numel(numel: int) -> int:
    """Elements of the smallest tree of squares that has room for a tensor of so many, or the most that there are."""
    return min(_MOST_NUMEL, ROW_NUMEL * tree_rows(max(1, numel)))


def norm_of(numbers: Iterable[float]) -> torch.Tensor:
    """The norm from the sums of all blocks: a tensor of no dimensions, fp32, on the host. NaN or Inf where a gradient is."""
    total = reduce(add, numbers, 0.0)  # left to right, where `sum` carries what it has rounded off
    # Through fp64: a norm beyond fp32 rounds to Inf, as in torch, where a direct conversion might refuse it.
    return torch.tensor(math.sqrt(total), dtype=torch.float64, device="cpu").float()


def clip_factor(max_norm: float, norm: torch.Tensor) -> torch.Tensor:
    """Factor of every gradient: max_norm / (norm + 1e-6), at most 1, in fp32; NaN for a NaN norm.

    Source: `torch.nn.utils.clip_grad_norm_`, which multiplies also where the factor is 1.
    """
    return torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
