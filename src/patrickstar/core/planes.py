"""Planes: the kinds of data a chunk has, the name of one plane of one chunk, and the planes that a use of gradients needs."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

WEIGHT: Final = "weight"  # what the model computes with
REST: Final = "rest"  # what completes a 16-bit weight to its fp32 master
GRAD: Final = "grad"
EXP_AVG: Final = "exp_avg"
EXP_AVG_SQ: Final = "exp_avg_sq"
STEP: Final = "step"  # no plane: the update of a chunk is of this, and stands for the count of updates of a parameter


class PlaneRef(NamedTuple):
    """One plane of one chunk: the unit of residency. Prints as `c12.weight`.

    For the plane `weight`, `chunk` is the head of a run and the unit is the whole run, since a weight is contiguous
    when used. A named tuple, because plans keep these in sets and as keys by the ten thousand.
    """

    chunk: int
    plane: str

    def __str__(self) -> str:
        return f"c{self.chunk}.{self.plane}"


class GradientUse(Enum):
    """The use of a gradient when it arrives."""

    CHUNK = "into its chunk's grad plane, until the step"
    UPDATE = "into the update of its parameter, at once"
    NONE = "nowhere: nothing is trained"

    @property
    def planes(self) -> tuple[str, ...]:
        """The planes of chunks that are trained which rest somewhere from the start, as far as their formats have them.

        Gradients do where all of them lie in their chunks until the step. Where nothing is trained, only weights do.
        """
        if self is GradientUse.NONE:
            return (WEIGHT,)
        return (WEIGHT, REST, *((GRAD,) if self is GradientUse.CHUNK else ()), EXP_AVG, EXP_AVG_SQ)
