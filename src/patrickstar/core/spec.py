"""What a layout needs to know of a parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A parameter's name, shape, whether it is trained, and whether it stays fp32 whole. Parameters that are tied appear once."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    whole: bool = False

    def kind(self) -> tuple[bool, bool]:
        """Whether it stays fp32 whole, and whether it is frozen: tensors of one kind share chunks."""
        return self.whole, not self.trainable

    @property
    def numel(self) -> int:
        """Elements: 1 for a scalar, 0 where a dim is 0."""
        return math.prod(self.shape)
