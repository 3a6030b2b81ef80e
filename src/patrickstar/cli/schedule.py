"""Learning rates over a run: a linear rise, then constant or a half cosine down to a tenth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

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

    def lr(self, done: int, base: float) -> float:
        """The rate after `done` steps."""
        return base * self.factor(done)

    def betas(self, done: int) -> None:
        """The optimizer's own, always."""
