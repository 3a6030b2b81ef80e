"""What a side of a comparison is told: who trains which decoder, and how; and the steps that it takes at its turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from benchmarks.gpu.decoder import Shape
from torch import Tensor

__all__ = ["RATE", "NotMeasuredError", "Side", "Step", "Turn"]

RATE: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Side:
    """Who trains a decoder, and how. `device`: "cuda", or "emulated" to try the benchmark itself where there is none.

    `device_memory`: alternatives, of which the first that is not refused is taken.
    """

    kind: str
    shape: Shape
    device: str = "cuda"
    step: str = "in_backward"
    clips: bool = False
    device_memory: tuple[int | str | None, ...] = (None,)
    host_memory: int | None = None
    stress_seed: int | None = None
    seed: int = 0

    @property
    def place(self) -> torch.device:
        """Where torch computes."""
        return torch.device("cuda" if self.device == "cuda" else "cpu")


@dataclass(frozen=True, slots=True)
class Turn:
    """So many steps, one after the other. `shares`: whether others need the memory that torch's allocator keeps meanwhile."""

    sequences: int
    tokens: int
    steps: int = 2
    shares: bool = True
    trace: Path | None = None
    """Where a profile of these steps goes, if one is taken."""


Step = Callable[[Tensor], Tensor]
"""From tokens to the loss."""


class NotMeasuredError(Exception):
    """A side that cannot run here, and why."""
