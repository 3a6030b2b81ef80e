"""An optimizer step that was called and not yet carried out, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from patrickstar.optim.hyper import Hyper

__all__ = ["Factors", "PendingStep"]

Factors = Mapping[str, tuple[Tensor, ...]]
"""What gradients are multiplied with first, in order (0-dim fp32), by name."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """What `optimizer.step()` asked for, as things stood then. See Note [Pending step] in `training.py`.

    Attributes:
        hypers: the hyper-parameters of each parameter that is updated, by name.
        steps: the number of this update for each of them, from 1.
        factors: what their gradients are multiplied with first.
    """

    hypers: Mapping[str, Hyper]
    steps: Mapping[str, int]
    factors: Factors = field(default_factory=dict)
