"""The global norm on a GPU: squares by the tree of `GlobalNorm`, from gradients as they lie there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from patrickstar.optim import triton_kernels as kernels
from patrickstar.optim.masters import blocks
from patrickstar.optim.norm import BLOCK_NUMEL, GlobalNorm
from patrickstar.optim.triton_launch import WIDENED, current, factor_arguments, launch

_SUBTREE_NUMEL = 16 << kernels.SUBTREE_LEVELS
_TREE_LEVELS = 12 - kernels.SUBTREE_LEVELS  # a block is 2**12 rows of 16
_SPAN_NUMEL = 1 << 24  # summed by one launch: 1 MiB of scratch
_NUMBERS = 32  # of blocks, by one program: one of each thread


class TritonNorm(GlobalNorm):
    """Adds up squares as `GlobalNorm` does, with its bits: 4 (or 2) bytes an element are read once, and 1/16 byte is written.

    Blocks that lie in a piece are summed where they lie; what is left of one at a piece's ends is collected in fp32 until it is whole.
    """

    def _take_scratch(self, largest: int | None) -> None:
        # Of smaller tensors one launch sums no more than there is.
        most = _SPAN_NUMEL if largest is None else max(1, -(-largest // BLOCK_NUMEL)) * BLOCK_NUMEL
        self._span = min(_SPAN_NUMEL, most)
        self._collected = torch.empty(BLOCK_NUMEL, device=self._device)
        self._subtrees = torch.empty(self._span // _SUBTREE_NUMEL * 16, dtype=torch.float64, device=self._device)
        self._rows = torch.empty(self._span // BLOCK_NUMEL * 16, dtype=torch.float64, device=self._device)

    @torch.no_grad()
    def add(self, piece: Tensor, factors: Sequence[Tensor] = ()) -> None:
        assert piece.dim() == 1, f"a piece must be flat, not {tuple(piece.shape)}"
        is_here = piece.device == self._device and piece.dtype in WIDENED
        start = 0
        while start < piece.numel():
            left = piece.numel() - start
            if is_here and not self._filled and left >= BLOCK_NUMEL:
                taken = left - left % BLOCK_NUMEL
                self._sum_of(piece[start : start + taken], factors)
            else:
                taken = min(left, BLOCK_NUMEL - self._filled)
                self._collect(piece[start : start + taken], factors, is_here=is_here)
            start += taken

    def end_tensor(self) -> None:
        filled, self._filled = self._filled, 0
        if filled:
            self._sum_of(self._collected[:filled], ())

    def _collect(self, part: Tensor, factors: Sequence[Tensor], *, is_here: bool) -> None:
        """Keeps a part of a block, which ends where the block does or before, and sums the block when it is whole."""
        target = self._collected[self._filled : self._filled + part.numel()]
        if is_here:
            numbers, in_memory = factor_arguments(factors, self._device)
            launch(kernels.put_kernel, (target, part), None, numbers, in_memory=in_memory, adds=False)
        else:
            target.copy_(part)
            for factor in factors:
                target.mul_(factor)
        self._filled += part.numel()
        if self._filled == BLOCK_NUMEL:
            self.end_tensor()

    def _sum_of(self, part: Tensor, factors: Sequence[Tensor]) -> None:
        """Adds blocks to the total, of which the last one may be cut."""
        scales, in_memory = factor_arguments(factors, self._device)
        with current(self._device):
            for span in blocks(part.numel(), of=self._span):
                numel = span.stop - span.start
                n_subtrees, n_blocks = -(-numel // _SUBTREE_NUMEL), -(-numel // BLOCK_NUMEL)
                numbers = torch.empty(n_blocks, dtype=torch.float64, device=self._device)
                kernels.subtrees_kernel[(-(-n_subtrees // 2),)](
                    part[span],
                    numel,
                    scales,
                    self._subtrees,
                    in_memory=in_memory,
                    levels=kernels.SUBTREE_LEVELS,
                    **kernels.TREE_OPTIONS,
                )
                kernels.trees_kernel[(n_blocks,)](
                    self._subtrees, n_subtrees, self._rows, levels=_TREE_LEVELS, **kernels.TREE_OPTIONS
                )
                kernels.numbers_kernel[(-(-n_blocks // _NUMBERS),)](
                    self._rows, numbers, n_blocks, block_numel=_NUMBERS, **kernels.TREE_OPTIONS
                )
                self._numbers.append(numbers)
