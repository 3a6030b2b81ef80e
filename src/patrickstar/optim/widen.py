"""16-bit gradients in fp32, block by block: nothing as large as a chunk is ever made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from patrickstar.optim.hyper import Hyper
from patrickstar.optim.kernel import Kernel

__all__ = ["BLOCK_NUMEL", "WideningKernel", "blocks", "scaled_blocks"]

BLOCK_NUMEL = 1 << 16
"""Elements that are widened at once: scratch that stays in a core's cache."""


def blocks(numel: int, *, of: int = BLOCK_NUMEL) -> Iterator[slice]:
    """Slices of so many elements at a time, the last one shorter."""
    for start in range(0, numel, of):
        yield slice(start, min(start + of, numel))


def scaled_blocks(piece: Tensor, factors: Sequence[Tensor]) -> Iterator[Tensor]:
    """A 1-D piece in fp32, multiplied with the factors in their order (0-dim fp32), block by block; the piece itself where it is that already."""
    if not factors:
        yield piece
        return
    for span in blocks(piece.numel()):
        block = piece[span].to(torch.float32, copy=True)
        for factor in factors:
            block.mul_(factor)
        yield block


class WideningKernel:
    """An update of fp32 masters from gradients of another type, by a kernel for fp32: the very same arithmetic, block by block.

    Args:
        kernel: updates the blocks.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._gradient = torch.empty(BLOCK_NUMEL, dtype=torch.float32, device="cpu")

    @torch.no_grad()
    def update(
        self,
        weight: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        step: int,
        hyper: Hyper,
        factors: Sequence[Tensor] = (),
    ) -> None:
        """Updates weight, exp_avg and exp_avg_sq in place; the gradient stays as it is.

        Args:
            weight, exp_avg, exp_avg_sq: fp32. grad: of any floating type, widened before anything else. All flat, contiguous, of one length.
            step, hyper: as for a kernel. factors: what the widened gradient is multiplied with first, in order (0-dim fp32).
        """
        for block in blocks(weight.numel()):
            gradient = self._gradient[: block.stop - block.start]
            gradient.copy_(grad[block])
            for factor in factors:
                gradient.mul_(factor)
            self._kernel.update(weight[block], gradient, exp_avg[block], exp_avg_sq[block], step=step, hyper=hyper)
