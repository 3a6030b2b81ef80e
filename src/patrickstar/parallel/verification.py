"""A proof on the user's own model: the same batch whole on one rank, and cut over the group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from patrickstar.parallel.cut_batches import TOKENS


@dataclass(frozen=True, slots=True)
class Verification:
    """The largest differences, relative to the largest element of each.

    Attributes:
        loss: of the loss; of the mean square of the logits, where a batch has no labels. logits: of those of tokens that are no padding.
        gradients: the largest of all parameters, relative to a thousandth of the largest gradient of all at least. parameter: which has it.
    """

    loss: float
    logits: float
    gradients: float
    parameter: str

    def __str__(self) -> str:
        return f"loss {self.loss:.1e}, logits {self.logits:.1e}, gradients {self.gradients:.1e} ({self.parameter})"


def verify(model: nn.Module, batch: Mapping[str, Any], cut: Any) -> Verification:
    """The differences between two runs of a model that is parallelized, by `cut`, a `ContextParallel`, as it is again afterwards."""
    before = [parameter.grad for parameter in model.parameters()]
    was_training = model.training
    model.eval()
    tokens = next(batch[name] for name in TOKENS if batch.get(name) is not None)
    length = tokens.shape[1]
    mask = batch.get("attention_mask")
    valid = (torch.ones(tokens.shape[:2], device=tokens.device) if mask is None else mask).to(torch.bool)
    cut.release(model)
    try:
        whole = _run(model, batch, lambda logits: (logits.double().square().mean(-1) * valid).sum() / valid.sum())
    finally:
        cut.parallelize(model)
    try:
        mine = _run(
            model, cut.shard(batch), lambda logits: _mean_square(logits, valid, cut), reduce=cut.reduce_gradients
        )
    finally:
        model.train(was_training)
        for parameter, grad in zip(model.parameters(), before, strict=True):
            parameter.grad = grad
    logits = cut.unshard(mine[1], 1, length)
    # A gradient may be zero but for rounding, as those of biases before a softmax are: it is looked at beside the others.
    least = 1e-3 * max((float(grad.abs().max()) for grad in whole[2].values()), default=0.0)
    of_parameters = {name: _difference(mine[2][name], grad, least=least) for name, grad in whole[2].items()}
    worst = max(of_parameters, key=lambda name: of_parameters[name], default="")
    return Verification(
        loss=_difference(mine[0], whole[0]),
        logits=_difference(logits[valid], whole[1][valid]),
        gradients=of_parameters.get(worst, 0.0),
        parameter=worst,
    )


def _run(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_of: Callable[[Tensor], Tensor],
    reduce: Callable[[nn.Module], None] = lambda _: None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, logits and gradients."""
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    loss = output.loss if batch.get("labels") is not None else loss_of(output.logits)
    loss.backward()
    reduce(model)
    gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), output.logits.detach(), gradients


def _mean_square(logits: Tensor, valid: Tensor, cut: Any) -> Tensor:
    mine = cut.shard({"input_ids": valid.long(), "labels": valid.long()})["input_ids"].bool()
    return cut.token_mean(logits.double().square().mean(-1), mine)


def _difference(one: Tensor, other: Tensor, *, least: float = 0.0) -> float:
    one, other = one.double(), other.double()
    return float((one - other).abs().max() / other.abs().max().clamp_min(least or torch.finfo(torch.float64).tiny))
