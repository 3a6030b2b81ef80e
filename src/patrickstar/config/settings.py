"""Settings of a run's optimizer and schedule, and of a config as a whole."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from patrickstar.config.arguments import MemoryOptions
from patrickstar.config.problems import refuse

SCHEDULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "LRRangeTest": "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase",
        "OneCycle": """cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size
            cycle_first_stair_count cycle_second_stair_count decay_step_size
            cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate""",
        "WarmupLR": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type",
        "WarmupDecayLR": "total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type",
        "WarmupCosineLR": "total_num_steps warmup_min_ratio cos_min_ratio warmup_num_steps warmup_type",
    }
)
"""The parameters of DeepSpeed's schedules."""

_REQUIRED: Final = frozenset({"cycle_min_lr", "cycle_max_lr", "total_num_steps"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Adam's settings; `decoupled`: the weight shrinks by itself (AdamW), else the decay is added to the gradient (L2)."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule of learning rates, by DeepSpeed's name, with the parameters that are given; `optim/schedules.py` has the formulas."""

    name: str
    given: Mapping[str, Any]

    def __post_init__(self) -> None:
        known = SCHEDULES[self.name].split()
        problems = [
            f"{param}={self.given[param]!r}: not a parameter of {self.name}, which takes {', '.join(known)}"
            for param in self.given
            if param not in known
        ]
        missing = [param for param in known if param in _REQUIRED and param not in self.given]
        refuse([*problems, *(f"{param}=?: missing: {self.name} needs it" for param in missing)], of=self.name)

    @property
    def follows_optimizer(self) -> bool:
        """Tells whether the rates depend on the optimizer's own."""
        no_rate = None if self.name == "WarmupLR" else 0.0
        return self.name == "WarmupCosineLR" or self.given.get("warmup_max_lr", no_rate) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """A config as a whole.

    Attributes:
        schedule: None: the learning rate stays. micro_batch_size: None: the config does not say. memory: the arguments of `manage`.
        values: of all honoured keys, by path. ignored: keys without effect. notes: what else a user should know of a config that is taken.
    """

    optimizer: OptimizerSettings
    schedule: Schedule | None
    accumulate: int
    micro_batch_size: int | None
    memory: MemoryOptions
    values: Mapping[str, Any]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Texts to warn with: the keys without effect once, together."""
        return (*self.notes, f"no effect here: {', '.join(self.ignored)}") if self.ignored else self.notes

    def tell(self, log: logging.Logger) -> None:
        """Logs the warnings."""
        for warning in self.warnings:
            log.warning("config: %s", warning)
