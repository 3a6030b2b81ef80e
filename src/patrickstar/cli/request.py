"""A request of `train`: all that was asked for, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patrickstar.cli.checkpoints import CheckpointFolder
from patrickstar.cli.configuration import Configuration
from patrickstar.cli.model_source import ModelSource
from patrickstar.cli.schedule import WarmupSchedule
from patrickstar.config.arguments import MemoryOptions
from patrickstar.config.settings import OptimizerSettings
from patrickstar.optim.schedules import Rates, ScheduledRates

__all__ = ["BETAS", "EPS", "WEIGHT_DECAY", "Request"]

BETAS = (0.9, 0.999)
EPS = 1e-8
WEIGHT_DECAY = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request of the command line. Attributes are its flags, where nothing else is said.

    Attributes:
        arguments: of `manage`. folder: of checkpoints; None: nothing is saved.
    """

    source: ModelSource
    arguments: MemoryOptions
    folder: CheckpointFolder | None
    configuration: Configuration | None
    warmup: WarmupSchedule

    data: Sequence[str]
    batch_size: int
    seq_len: int
    accumulate: int
    steps: int
    lr: float
    clip: float | None
    seed: int
    save_every: int | None
    resume: bool
    compare_plain: bool
    log_json: Path | None

    @property
    def rates(self) -> Rates:
        """The rates of the config's scheduler, where it has one, else of the flags."""
        of_config = None if self.configuration is None else self.configuration.schedule
        return self.warmup if of_config is None else ScheduledRates(of_config)

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
