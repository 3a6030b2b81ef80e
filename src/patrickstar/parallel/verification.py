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
    before, was_training = [parameter.grad for parameter in model.parameters()], model.training
    tokens = next(batch[name] for name in TOKENS if batch.get(name) is not None)
    mask = batch.get("attention_mask")
    valid = (torch.ones(tokens.shape[:2], device=tokens.device) if mask is None else mask).to(torch.bool)
    model.eval()
    try:
        cut.release(model)
        try:
            loss, logits, gradients = _run(model, batch, lambda values: (values * valid).sum() / valid.sum())
        finally:
            cut.parallelize(model)
        is_valid = cut.shard({"input_ids": valid.long()})["input_ids"].bool()
        mine = _run(model, cut.shard(batch), lambda values: cut.token_mean(values, is_valid), cut.reduce_gradients)
    finally:
        model.train(was_training)
        for parameter, grad in zip(model.parameters(), before, strict=True):
            parameter.grad = grad
    # A gradient may be zero but for rounding, as those of biases before a softmax are: it is looked at beside the others.
    least = 1e-3 * max((float(grad.abs().max()) for grad in gradients.values()), default=0.0)
    found = {name: _difference(mine[2][name], grad, least=least) for name, grad in gradients.items()}
    worst = max(found, key=lambda name: found[name], default="")
    return Verification(
        loss=_difference(mine[0], loss),
        logits=_difference(cut.unshard(mine[1], 1, tokens.shape[1])[valid], logits[valid]),
        gradients=found.get(worst, 0.0),
        parameter=worst,
    )


def _run(
    model: nn.Module,
    batch: Mapping[str, Any],
    mean: Callable[[Tensor], Tensor],
    reduce: Callable[[nn.Module], None] = lambda _: None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, logits and gradients. `mean`: of a number a token, where there are no labels."""
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    loss = output.loss if batch.get("labels") is not None else mean(output.logits.double().square().mean(-1))
    loss.backward()
    reduce(model)
    gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), output.logits.detach(), gradients


def _difference(one: Tensor, other: Tensor, *, least: float = 0.0) -> float:
    one, other = one.double(), other.double()
    return float((one - other).abs().max() / other.abs().max().clamp_min(least or torch.finfo(torch.float64).tiny))
