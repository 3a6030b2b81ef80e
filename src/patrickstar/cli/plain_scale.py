"""The loss scale of plain PyTorch's fp16: DeepSpeed's rule, written out from its description.

Nothing of the library takes part but the numbers that both are given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from patrickstar.config.loss_scale import LossScale

__all__ = ["PlainScale", "Scaling"]


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scaling of losses. `scale`: the one at the end. `skipped`: steps whose gradients overflowed."""

    scale: float
    skipped: int

    def __str__(self) -> str:
        return f"a loss scale of {self.scale:.10g} after {self.skipped} skipped steps"


class PlainScale:
    """A scale that changes after every step.

    An overflow lowers it only where `hysteresis` overflows have come since it last grew. It grows wherever the steps since the last overflow, or
    since the beginning, are a multiple of `window`. (Source: `DynamicLossScaler.update_scale` of DeepSpeed, which counts iterations as here.)
    """

    def __init__(self, given: LossScale) -> None:
        self._given = given

        self.scale = float(given.initial)
        self.skipped = 0
        self._iteration = 0
        self._last_overflow = -1
        self._patience = given.hysteresis

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale in fp32, whatever the loss is of."""
        return loss * torch.tensor(self.scale, dtype=torch.float32)

    def unscale_(self, gradients: Iterable[Tensor]) -> bool:
        """Divides fp32 gradients by the scale, which ends the scale's step; gives whether any gradient had overflowed."""
        overflow, reciprocal = False, torch.tensor(1 / self.scale, dtype=torch.float32)
        for gradient in gradients:
            overflow = overflow or not bool(torch.isfinite(gradient).all())
            gradient.mul_(reciprocal)
        if overflow:
            self._lower()
        else:
            self._grow()
        self._iteration += 1
        return overflow

    @property
    def scaling(self) -> Scaling:
        return Scaling(self.scale, self.skipped)

    def _lower(self) -> None:
        self.skipped += 1
        self._last_overflow = self._iteration
        if not self._given.dynamic:
            return
        if self._patience > 1:
            self._patience -= 1
        else:
            self.scale = max(self.scale / self._given.factor, float(self._given.minimum))

    def _grow(self) -> None:
        if not self._given.dynamic:
            return
        if self._given.consecutive_hysteresis:
            self._patience = self._given.hysteresis
        if (self._iteration - self._last_overflow) % self._given.window == 0:
            self._patience = self._given.hysteresis
            self.scale *= self._given.factor
