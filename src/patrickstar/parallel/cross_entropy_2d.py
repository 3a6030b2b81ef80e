"""Cross-entropy of logits whose vocabulary is cut over columns and whose rows are cut over rows (Optimus, section 3.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from patrickstar.parallel.cut_batches import IGNORED
from patrickstar.parallel.grid import Grid, chunk_sizes
from patrickstar.parallel.layers_2d import place_of
from patrickstar.parallel.token_losses import mean_over


def cross_entropy_of_blocks(
    grid: Grid, size: int, logits: Tensor, labels: Tensor, ignore_index: int = IGNORED, count: Any = None
) -> Tensor:
    """The mean over the valid labels of all rows, the same on all ranks; its gradient is this rank's share.

    Args:
        size: of the vocabulary. logits: [..., V] of this column. labels: [...] of this row, alike in its columns.
        count: what to divide by in place of the number of valid labels.
    """
    valid = labels != ignore_index
    return mean_over(_CrossEntropy.apply(grid, size, logits, labels, valid), valid, grid.rows, of=count)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropies [...], at least in fp32; those of labels that are not valid mean nothing."""

    @staticmethod
    def forward(ctx: Any, grid: Grid, size: int, logits: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
        sizes, j = chunk_sizes(size, grid.q), grid.cols.rank
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        here = valid & (place_of(labels, sizes) == j)
        index = torch.where(here, labels - j * sizes[0], 0).unsqueeze(-1)
        largest = grid.cols.largest(wide.amax(-1))
        target = torch.where(here, wide.gather(-1, index).squeeze(-1), 0)
        target, total = grid.cols.sum(target, (wide - largest.unsqueeze(-1)).exp().sum(-1))
        lse = largest + total.log()
        ctx.save_for_backward(logits, lse, index, here)
        return lse - target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, lse, index, here = ctx.saved_tensors
        p = (logits.to(lse.dtype) - lse.unsqueeze(-1)).exp_()
        p.scatter_add_(-1, index, -here.unsqueeze(-1).to(p.dtype))
        return None, None, p.mul_(gradient.unsqueeze(-1)).to(logits.dtype), None, None
