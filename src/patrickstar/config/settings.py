"""Settings of a run's optimizer and schedule, and of a config as a whole."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from patrickstar.config.arguments import MemoryOptions
from patrickstar.config.kinds import refuse

REQUIRED: Final = object()


def _schedules() -> Iterator[tuple[str, dict[str, Any]]]:
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"}
    test = {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000, "lr_range_test_step_rate": 1.0}
    cycle: dict[str, Any] = {"cycle_first_step_size": 2000, "cycle_second_step_size": None}
    cycle |= {"cycle_first_stair_count": 0, "cycle_second_stair_count": None, "cycle_momentum": True}
    cycle |= {"cycle_min_mom": 0.8, "cycle_max_mom": 0.9}
    decay = {"decay_lr_rate": 0.0, "decay_mom_rate": 0.0, "decay_step_size": 0}
    cosine = {"warmup_num_steps": 1000, "warmup_type": "log", "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001}
    yield "LRRangeTest", {**test, "lr_range_test_staircase": False}
    yield "OneCycle", {"cycle_min_lr": REQUIRED, "cycle_max_lr": REQUIRED, **cycle, **decay}
    yield "WarmupLR", warmup
    yield "WarmupDecayLR", {"total_num_steps": REQUIRED, **warmup, "warmup_max_lr": 1e-3}
    yield "WarmupCosineLR", {"total_num_steps": REQUIRED, **cosine}


SCHEDULES: Final = MappingProxyType({name: MappingProxyType(parameters) for name, parameters in _schedules()})
"""The parameters of DeepSpeed's schedules, with their defaults."""


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
        known = SCHEDULES[self.name]
        problems = [
            f"{param}={value!r}: not a parameter of {self.name}, which takes {', '.join(known)}"
            for param, value in self.given.items()
            if param not in known
        ]
        missing = [param for param, value in self.parameters.items() if value is REQUIRED]
        refuse([*problems, *(f"{param}=?: missing: {self.name} needs it" for param in missing)], of=self.name)

    @property
    def parameters(self) -> dict[str, Any]:
        """All parameters: those that are given, and defaults of the others."""
        return {**SCHEDULES[self.name], **self.given}

    @property
    def follows_optimizer(self) -> bool:
        """Tells whether the rates depend on the optimizer's own."""
        return self.name == "WarmupCosineLR" or self.parameters.get("warmup_max_lr", 0.0) is None


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
