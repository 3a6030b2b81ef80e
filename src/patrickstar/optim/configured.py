"""An optimizer and a schedule of its rates, as a config asks for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from patrickstar.config.engine.schedules import Rates
from patrickstar.config.engine.settings import OptimizerSettings

__all__ = ["Scheduler", "build_optimizer"]


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


class Scheduler(LRScheduler):
    """Sets the rates of a schedule, and its betas where it has some, at every `step()`. Each group is its own base."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Rates) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rate of each group after as many steps as there were."""
        return [self.schedule.lr(self.last_epoch, float(base)) for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Goes on by one step.

        Raises:
            ConfigError: the schedule's betas have left what Adam takes.
        """
        super().step(epoch)
        betas = self.schedule.betas(self.last_epoch)
        if betas is not None:
            for group in self.optimizer.param_groups:
                group["betas"] = betas

    def state_dict(self) -> dict[str, Any]:
        """The count of steps. What the schedule does is the config's, and the rates themselves are the optimizer's."""
        state = super().state_dict()
        del state["schedule"]
        return state
