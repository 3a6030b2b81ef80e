"""An optimizer as a config asks for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from patrickstar.config.engine.settings import OptimizerSettings

__all__ = ["build_optimizer"]


def build_optimizer(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """torch's AdamW where the decay is decoupled, else its Adam, with one group."""
    kind = torch.optim.AdamW if settings.decoupled else torch.optim.Adam
    return kind(
        list(parameters),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
