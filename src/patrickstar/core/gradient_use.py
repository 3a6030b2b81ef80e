"""Where gradients go."""

from __future__ import annotations

from enum import Enum

from patrickstar.core.plane import EXP_AVG, EXP_AVG_SQ, GRAD, REST, WEIGHT

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

    @property
    def planes(self) -> tuple[str, ...]:
        """The planes of chunks that are trained which rest somewhere, as far as their formats have them; where nothing is trained, weights."""
        if self is GradientUse.NONE:
            return (WEIGHT,)
        return (WEIGHT, REST, *((GRAD,) if self.rest else ()), EXP_AVG, EXP_AVG_SQ)
