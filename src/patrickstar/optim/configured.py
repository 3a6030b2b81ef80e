"""An optimizer and a schedule of its rates, as a config asks for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from patrickstar.config.settings import OptimizerSettings
from patrickstar.optim.schedules import Rates


def build_optimizer(
    parameters: Iterable[nn.Parameter], settings: OptimizerSettings, *, fused: bool | None = None
) -> torch.optim.Optimizer:
    """torch's AdamW where the decay is decoupled, else its Adam, with one group."""
    kind = torch.optim.AdamW if settings.decoupled else torch.optim.Adam
    of_group = {name: value for name, value in asdict(settings).items() if name != "decoupled"}
    return kind(list(parameters), **of_group, fused=fused)


class Scheduler(LambdaLR):
    """Sets rates, and betas where there are some, at every `step()`. Each group is its own base.

    torch multiplies a group's first rate with what its function gives. Rates are not shares of it: so the first is 1 to torch, and no bit is lost.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rates: Rates) -> None:
        bases = [float(group["lr"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 1.0
        self._betas = rates.betas
        super().__init__(optimizer, [partial(lambda base, done: rates.lr(done, base), base) for base in bases])

    def step(self, epoch: int | None = None) -> None:
        """Goes on by one step. ConfigError: the schedule's betas have left what Adam takes."""
        super().step(epoch)
        betas = self._betas(self.last_epoch)
        if betas is not None:
            for group in self.optimizer.param_groups:
                group["betas"] = betas

    def state_dict(self) -> dict[str, Any]:
        """The count of steps. What the schedule does is the config's, and the rates themselves are the optimizer's."""
        state = super().state_dict()
        del state["_betas"]
        return state
