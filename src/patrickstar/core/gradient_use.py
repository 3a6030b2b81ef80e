"""Where gradients go."""

from __future__ import annotations

from enum import Enum

__all__ = ["GradientUse"]


class GradientUse(Enum):
    """Where a gradient goes when it arrives."""

    CHUNK = "into its chunk's grad plane, until the step"
    UPDATE = "into the update of its parameter, at once"
    TENSOR = "nowhere: it stays the tensor that autograd made, as in PyTorch, until the step"
    NONE = "nowhere: nothing is trained"

    @property
    def rest(self) -> bool:
        """Whether every gradient lies in its chunk until the step, and so has a home from the start."""
        return self is GradientUse.CHUNK
