"""Cross-entropy of logits whose vocabulary is cut over columns and whose rows are cut over rows (Optimus, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from patrickstar.parallel.grid import Grid, chunk_sizes
from patrickstar.parallel.layers_2d import place_of


def cross_entropy_of_blocks(
    grid: Grid,
    logits: Tensor,
    labels: Tensor,
    size: int,
    *,
    ignore_index: int = -100,
    count: Tensor | float | None = None,
) -> Tensor:
    """The mean over the valid labels of all rows, the same on all ranks; its gradient is this rank's share.

    Args:
        logits: [..., V] of this column. labels: [...] of this row, alike in its columns. size: of the vocabulary.
        count: what to divide by in place of the number of valid labels.
    """
    return _CrossEntropy.apply(grid, (size, ignore_index, count), logits, labels)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grid: Grid, options: tuple[int, int, Any], logits: Any, labels: Any) -> Tensor:
        size, ignore_index, count = options
        sizes = chunk_sizes(size, grid.q)
        wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
        labels = labels.flatten()
        valid = labels != ignore_index
        here = valid & (place_of(labels, sizes) == grid.cols.rank)
        index = torch.where(here, labels - grid.cols.rank * sizes[0], 0)[:, None]

        largest = grid.cols.largest(wide.amax(-1))
        target = torch.where(here, wide.gather(-1, index)[:, 0], 0)
        target, total = grid.cols.sum(target, (wide - largest[:, None]).exp().sum(-1))
        lse = largest + total.log()
        loss, n_valid = grid.rows.sum(torch.where(valid, lse - target, 0).sum().double(), valid.sum().double())
        divisor = n_valid.clamp(min=1) if count is None else count
        ctx.save_for_backward(logits, lse, index, here, valid, (1 / divisor) * torch.ones_like(loss))
        return (loss / divisor).to(wide.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, lse, index, here, valid, factor = ctx.saved_tensors
        p = (logits.flatten(0, -2).to(lse.dtype) - lse[:, None]).exp_()
        p.scatter_add_(-1, index, -here[:, None].to(p.dtype))
        p.mul_((valid * (gradient * factor).to(p.dtype))[:, None])
        return None, None, p.to(logits.dtype).view(logits.shape), None


@dataclass(frozen=True, slots=True)
class CausalLoss:
    """The loss of a causal language model of `transformers`, over blocks; it is called as theirs is. `size`: of the vocabulary."""

    grid: Grid
    size: int

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        *,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The mean over valid labels, each token's being the next one, or the sum over `num_items_in_batch`."""
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return cross_entropy_of_blocks(
            self.grid, logits, shift_labels, self.size, ignore_index=ignore_index, count=num_items_in_batch
        )
