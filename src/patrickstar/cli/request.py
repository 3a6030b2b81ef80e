"""A request of `train`: all that was asked for, checked; and the learning rates of its flags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from patrickstar.cli.configuration import Configuration
from patrickstar.cli.models import ModelSource
from patrickstar.cli.together import Together
from patrickstar.config.arguments import MemoryOptions
from patrickstar.config.settings import OptimizerSettings
from patrickstar.optim.schedules import Rates, rates_of

BETAS = (0.9, 0.999)
EPS = 1e-8
WEIGHT_DECAY = 0.01
SCHEDULES: Final = ("constant", "cosine")
# Where the cosine ends, as a share of the peak: the last steps should still learn something.
LOWEST: Final = 0.1


@dataclass(frozen=True, slots=True)
class WarmupSchedule:
    """The factor on `--lr` of each step; steps count from 0, as `torch.optim.lr_scheduler.LambdaLR` counts them."""

    kind: str
    warmup: int
    steps: int

    def factor(self, step: int) -> float:
        """The factor on the peak rate: rises to 1 at the end of the warmup, then stays, or falls as (1 + cos) / 2 to `LOWEST`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant" or self.steps <= self.warmup:
            return 1.0
        share = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * share))

    @property
    def rates(self) -> Rates:
        """The rates that the factor makes of the optimizer's own."""
        return Rates(lambda done, base: base * self.factor(done))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request of the command line. Attributes are its flags, where nothing else is said.

    Attributes:
        arguments: of `manage`. warmup: the schedule that flags ask for. together: how ranks share a batch.
    """

    source: ModelSource
    arguments: MemoryOptions
    configuration: Configuration | None
    warmup: WarmupSchedule
    together: Together

    data: Sequence[str]
    batch_size: int
    seq_len: int
    accumulate: int
    steps: int
    lr: float
    clip: float | None
    seed: int
    checkpoint_dir: Path | None
    save_every: int | None
    keep: int
    resume: bool
    compare_plain: bool
    log_json: Path | None

    @property
    def rates(self) -> Rates:
        """The rates of the config's scheduler, where it has one, else of the flags."""
        of_config = None if self.configuration is None else self.configuration.settings.schedule
        return self.warmup.rates if of_config is None else rates_of(of_config)

    @property
    def optimizer(self) -> OptimizerSettings:
        """The optimizer's settings in the config, where it has some, else AdamW at `lr`."""
        of_config = None if self.configuration is None else self.configuration.optimizer
        usual = OptimizerSettings(lr=self.lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, decoupled=True)
        return usual if of_config is None else of_config

    @property
    def shape(self) -> dict[str, Any]:
        """The shape of a batch."""
        return {"batch_size": self.batch_size, "seq_len": self.seq_len}
