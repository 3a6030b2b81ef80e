"""What a layout needs to know of a parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A parameter's name, shape, whether it is trained, and whether it stays fp32 whole. Parameters that are tied appear once.

    `tile_numel`: elements of a tile, where the parameter need not be resident as a whole; the last tile may have fewer. `table`: whether it is
    looked up in by rows where it rests, and so shares no chunk with what is fetched.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    whole: bool = False
    tile_numel: int | None = None
    table: bool = False

    def kind(self) -> tuple[bool, bool, bool]:
        """Whether it stays fp32 whole, is frozen, and is a table: tensors of one kind share chunks."""
        return self.whole, not self.trainable, self.table

    @property
    def numel(self) -> int:
        """Elements: 1 for a scalar, 0 where a dim is 0."""
        return math.prod(self.shape)

    def tiles(self) -> list[int]:
        """Elements of each of its tiles, in order: one, where it has none."""
        tile = self.tile_numel or self.numel
        return [min(tile, self.numel - start) for start in range(0, self.numel, tile)] if self.numel else [0]
