"""The losses of a model: of a step's micro-batches, with their gradients, and of held-out batches, without.

Every micro-batch has the same number of tokens, so the mean of their losses weighs every token alike:
`loss / accumulate` is what one large batch would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from patrickstar.cli.batches import Batch, BatchSource


def accumulate_gradients(
    model: nn.Module,
    batches: BatchSource,
    accumulate: int,
    *,
    scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss,
    after_backward: Callable[[], None] = lambda: None,
) -> float:
    """Forward and backward of one step's micro-batches, of losses that are scaled; gives the mean of those that are not."""
    total = 0.0
    for _ in range(accumulate):
        loss = model(**batches.next()).loss
        scale(loss if accumulate == 1 else loss / accumulate).backward()
        after_backward()
        total += loss.item()
    return total / accumulate


def validation_loss(model: nn.Module, batches: Sequence[Batch], *, advance: Callable[[int], None]) -> float:
    """The mean loss over held-out batches, without gradients and without dropout."""
    training = model.training
    model.eval()
    total = 0.0
    try:
        with torch.no_grad():
            for batch in batches:
                total += model(**batch).loss.item()
                advance(1)
    finally:
        model.train(training)
    return total / len(batches)
