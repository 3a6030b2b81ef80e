"""Plain PyTorch that multiplies with some rows of a weight at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TiledProducts:
    """`F.linear`, but with a weight of a linear or embedding that has more rows than this it is a product for each tile of them.

    Not the output of `nn.MultiheadAttention`, whose weight is part of one operation of torch's.

    Attributes:
        count: how many linears were done so.
    """

    def __init__(self, model: nn.Module, rows: int) -> None:
        self._rows = rows
        attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
        not_called = {part for attention in attentions for part in attention.modules()}
        owners = [
            module
            for module in model.modules()
            if isinstance(module, nn.Linear | nn.Embedding) and module not in not_called
        ]
        weights = [module._parameters.get("weight") for module in owners]
        self._tiled = {id(weight) for weight in weights if weight is not None and weight.shape[0] > rows}
        self._linear = F.linear
        self.count = 0

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:  # noqa: A002 - torch's own name
        if id(weight) not in self._tiled:
            return self._linear(input, weight, bias)
        self.count += 1
        weights = weight.split(self._rows)
        biases = [None] * len(weights) if bias is None else bias.split(self._rows)
        return torch.cat([self._linear(input, *tile) for tile in zip(weights, biases, strict=True)], -1)


@contextmanager
def tiled_products(model: nn.Module, rows: int) -> Iterator[TiledProducts]:
    """torch's own function is another for a while: a mode would not see what backward computes again."""
    tiled = TiledProducts(model, rows)
    with mock.patch.object(F, "linear", tiled):
        yield tiled
