"""DeepSpeed's learning rates over a run, as formulas: what a step's rate is, from how many steps were before it.

DeepSpeed sets a rate when a scheduler is made, and another after every step that updates; its own count of iterations begins at -1.
`lr(n)` is what it has after n such steps, and so the rate of update n + 1. The order of operations is DeepSpeed's, so that rates have
its bits.

Source: deepspeed/runtime/lr_schedules.py of 0.19; docs at deepspeed.readthedocs.io/en/latest/schedulers.html.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final, Protocol

from patrickstar.errors import ConfigError

__all__ = ["SCHEDULES", "LRRangeTest", "OneCycle", "Rates", "Schedule", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

Betas = tuple[float, float]


class Rates(Protocol):
    """A giver of a learning rate over a run."""

    def lr(self, done: int, base: float) -> float:
        """The rate after `done` steps; `base`: the optimizer's own rate."""
        ...

    def betas(self, done: int) -> Betas | None:
        """The betas after `done` steps; None: as the optimizer has them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A learning rate over a run, and where a schedule says so the betas of Adam."""

    required: ClassVar[tuple[str, ...]] = ()
    """Parameters that must be given."""

    @property
    def follows_optimizer(self) -> bool:
        """Tells whether the rates depend on the optimizer's own."""
        return False

    def lr(self, done: int, base: float) -> float:
        """The rate after `done` steps; `base`: the optimizer's own rate."""
        raise NotImplementedError

    def betas(self, done: int) -> Betas | None:  # noqa: ARG002 - most leave them alone
        """The betas after `done` steps; None: as the optimizer has them."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LRRangeTest(Schedule):
    """Rises without end, from step to step or in stairs: to find the largest rate that a model bears."""

    lr_range_test_min_lr: float = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def lr(self, done: int, base: float) -> float:  # noqa: ARG002 - the rates are its own
        interval = float(done) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            interval = math.floor(interval)
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCycle(Schedule):
    """A rate that goes up and down once, while the first beta goes down and up; then a decay. Source of the idea: arXiv:1803.09820."""

    cycle_min_lr: float
    cycle_max_lr: float
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: float = 0.8
    cycle_max_mom: float = 0.9
    decay_mom_rate: float = 0.0

    required: ClassVar[tuple[str, ...]] = ("cycle_min_lr", "cycle_max_lr")
    second_beta: ClassVar[float] = 0.99

    @property
    def _second(self) -> float:
        return float(self.cycle_first_step_size if self.cycle_second_step_size is None else self.cycle_second_step_size)

    @property
    def _cycle(self) -> float:
        return float(self.cycle_first_step_size) + self._second

    def lr(self, done: int, base: float) -> float:  # noqa: ARG002 - the rates are its own
        if done == 0:
            return self.cycle_min_lr
        if done <= self._cycle:
            return self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * self._height(done)
        if self.decay_step_size == 0 or math.isclose(self.decay_lr_rate, 0):
            return self.cycle_min_lr
        return self.cycle_min_lr / (1 + self.decay_lr_rate * self._decayed(done))

    def betas(self, done: int) -> Betas | None:
        """The first and second beta after `done` steps; None: as the optimizer has them.

        Raises:
            ConfigError: the first beta, which grows after the cycle, has come to 1.
        """
        if not self.cycle_momentum:
            return None
        if done == 0:  # DeepSpeed begins at the low end and jumps to the high one with the first step
            return self.cycle_min_mom, self.second_beta
        if done <= self._cycle:
            low, high = self.cycle_min_mom, self.cycle_max_mom
            return high - (high - low) * self._height(done), self.second_beta
        if self.decay_step_size == 0 or math.isclose(self.decay_mom_rate, 0):
            return self.cycle_max_mom, self.second_beta
        beta = self.cycle_max_mom * (1 + self.decay_mom_rate * self._decayed(done))
        if beta >= 1:
            raise ConfigError(
                f"scheduler.params.decay_mom_rate={self.decay_mom_rate}: the first beta is {beta:g} after {done} steps, and must stay below 1; "
                "write a smaller rate, or a larger decay_step_size"
            )
        return beta, self.second_beta

    def _decayed(self, done: int) -> float:
        """Decay intervals since the end of the cycle."""
        return (done - self._cycle) / self.decay_step_size

    def _height(self, done: int) -> float:
        """Height of a step on the cycle: 0 at the cycle's ends, 1 at its top."""
        whole, first = self._cycle, float(self.cycle_first_step_size)
        top = first / whole
        cycle = math.floor(1 + done / whole)
        x = 1.0 + done / whole - cycle
        rising = x <= top
        first_stairs = self.cycle_first_stair_count
        second_stairs = first_stairs if self.cycle_second_stair_count is None else self.cycle_second_stair_count
        stairs = first_stairs if rising else second_stairs
        if not stairs:
            return x / top if rising else (x - 1) / (top - 1)
        at = done % whole
        position = at * stairs / first if at <= first else (whole - at) * stairs / self._second
        return math.floor(position) / stairs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Warmup(Schedule):
    """The part that three schedules have in common: a rise, by the logarithm of the step or evenly."""

    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    @property
    def _rise(self) -> int:
        return max(2, self.warmup_num_steps)

    def _risen(self, iteration: int) -> float:
        """The share of the rise that is done at an iteration within it."""
        if self.warmup_type == "log":
            return 1.0 / math.log(self._rise) * math.log(iteration + 1)
        return iteration / self._rise


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupLR(_Warmup):
    """Rises to a rate, and stays there."""

    warmup_min_lr: float = 0.0
    warmup_max_lr: float | None = None

    @property
    def follows_optimizer(self) -> bool:
        return self.warmup_max_lr is None

    def lr(self, done: int, base: float) -> float:
        highest = base if self.warmup_max_lr is None else self.warmup_max_lr
        if done == 0:
            return self.warmup_min_lr
        return self.warmup_min_lr + (highest - self.warmup_min_lr) * self._share(done - 1)

    def _share(self, iteration: int) -> float:
        return self._risen(iteration) if iteration < self._rise else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupDecayLR(WarmupLR):
    """Rises to a rate, and falls evenly to the first at the end of the run."""

    total_num_steps: int
    warmup_max_lr: float | None = 1e-3

    required: ClassVar[tuple[str, ...]] = ("total_num_steps",)

    def _share(self, iteration: int) -> float:
        if iteration < self._rise:
            return self._risen(iteration)
        left = float(self.total_num_steps - iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self._rise)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupCosineLR(_Warmup):
    """Rises to the optimizer's rate, and falls along half a cosine."""

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    cos_min_ratio: float = 0.0001

    required: ClassVar[tuple[str, ...]] = ("total_num_steps",)

    @property
    def follows_optimizer(self) -> bool:
        return True

    def lr(self, done: int, base: float) -> float:
        return 0.0 if done == 0 else base * self._ratio(done - 1)

    def _ratio(self, iteration: int) -> float:
        if iteration < self._rise:
            return self.warmup_min_ratio + self._risen(iteration) * (1.0 - self.warmup_min_ratio)
        after = iteration - self._rise + 1
        progress = min(1.0, after / max(1, self.total_num_steps - self._rise))
        share = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * share)


SCHEDULES: Final[Mapping[str, type[Schedule]]] = MappingProxyType(
    {kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
)
