"""Means over the valid tokens of a group: the value is the whole's, the gradient is this rank's share of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from patrickstar.errors import ConfigError, StateError
from patrickstar.parallel.cut_batches import IGNORED
from patrickstar.parallel.group import MeshGroup


def mean_over(values: Tensor, valid: Tensor, group: MeshGroup, *, gradient_scale: int = 1, of: Any = None) -> Tensor:
    """The mean of valid values over a group; 0 where there are none. `of`: a number to divide by in place of that of valid values."""
    if values.shape != valid.shape:
        raise ConfigError(f"token_mean: values {list(values.shape)} and valid {list(valid.shape)} are not alike")
    local = torch.where(valid, values, 0).sum(dtype=torch.float64)
    total, count = _Whole.apply(local, valid.sum(), group, gradient_scale)
    return (total / (count.clamp_min(1) if of is None else of)).to(values.dtype)


def mean_alone(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """The mean cross-entropy of one rank's valid labels, with the bits of torch's; 0 where there are none."""
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index)
    return torch.where((labels != ignore_index).any(), loss, 0)


def token_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Cross-entropies [B, c] of logits [B, c, V], in fp32 (fp64 in fp64). ConfigError: there are no labels for just these tokens."""
    if logits.shape[:-1] != labels.shape:
        raise ConfigError(
            f"cross_entropy: labels {list(labels.shape)} for logits {list(logits.shape)}: give both of this rank's tokens, cut by shard"
        )
    exact = logits if logits.dtype == torch.float64 else logits.float()
    flat = F.cross_entropy(exact.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=ignore_index)
    return flat.view(labels.shape)


class _Whole(torch.autograd.Function):
    """Sum and number over a group, whose gradient is that of this rank's own."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, count: Tensor, group: MeshGroup, scale: int) -> tuple[Tensor, Tensor]:
        total, number = group.sum(local, count.to(local.dtype))
        ctx.scale = scale
        ctx.mark_non_differentiable(number)
        return total, number

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        return grad * ctx.scale, None, None, None


@dataclass(frozen=True, slots=True)
class CausalLoss:
    """The loss of a causal language model of `transformers`, called as theirs is: a mean of valid labels, or their sum over `num_items_in_batch`.

    Attributes:
        mean: of logits, shifted labels, the label that is not valid, and a number to divide by or None. shifts: labels that are not shifted, each
            being the one before its own; else they are refused.
    """

    mean: Callable[[Tensor, Tensor, int, Any], Tensor]
    shifts: bool

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        *_: Any,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **__: Any,
    ) -> Tensor:
        """The loss of this rank's logits."""
        if shift_labels is None:
            if labels is None or not self.shifts:
                raise StateError("labels that are not shifted: call the model with **cp.shard(batch)")
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return self.mean(logits, shift_labels, ignore_index, num_items_in_batch)
