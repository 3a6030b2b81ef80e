"""A parameter under management: the record of where its bytes are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from patrickstar.core.plane import PlaneRef
from patrickstar.memory.leases import WeightKey

__all__ = ["BoundParameter"]


@dataclass(slots=True, eq=False)
class BoundParameter:
    """A parameter, and where its bytes are.

    `shape_only` is a meta tensor with the parameter's shape and strides; `offset` is in elements from the start of the first of the units that it
    lies in, which are one but for a parameter in tiles. Dense parameters keep their strides (channels last, say), others and those in tiles are
    contiguous. `tensor` gives the parameter, or a detached alias of it (Note [Binding]), which the record does not keep alive.
    """

    name: str
    owner: str
    """The parameter's name; of a tile, the name of the parameter that it is of."""
    tensor: Callable[[], Tensor]
    refs: tuple[PlaneRef, ...]
    offset: int
    shape_only: Tensor

    standin: Tensor
    is_copied: bool = False
    """Whether uses see a copy in the type that computes (Note [Copies] in `leases.py`), not the slot itself."""
    lease: Tensor | None = (
        None  # of a detached alias whose address has been asked for: the slot stays as long as the alias lives
    )
    depth: int = 0  # uses and module calls that hold it now
    handles: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)
    tiles: tuple[BoundParameter, ...] = ()
    """The records of its tiles (Note [Tiles] in `tiles.py`)."""
    first_row: int = 0
    """Of a tile: which row of its parameter it begins with."""
    is_table: bool = False
    """Whether tiles are for lookups alone: products see the whole."""
    by_rows: bool = False
    """Whether lookups gather rows from where the tiles rest (`lookups.py`)."""

    @property
    def ref(self) -> PlaneRef:
        """The unit that it lies in; of a parameter in tiles, the first."""
        return self.refs[0]

    @property
    def rows(self) -> int:
        """How many rows a tile has, or a parameter in tiles."""
        return int(self.shape_only.shape[0])

    def of(self, whole: Tensor) -> Tensor:
        """A tile's rows of a tensor of its parameter's shape."""
        return whole[self.first_row : self.first_row + self.rows]

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself."""
        return self.tensor()  # type: ignore[return-value]

    @property
    def key(self) -> WeightKey:
        """What is leased at a use: the unit, or the copy of this parameter."""
        return self.name if self.is_copied else self.ref

    def over(self, leased: Tensor) -> Tensor:
        """The parameter's values in the 1-D tensor that is leased at a use."""
        start = 0 if self.is_copied else self.offset
        return torch.as_strided(leased, self.shape_only.shape, self.shape_only.stride(), start)

    def flat(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape as 1-D, in the order in which the parameter lies in its slot; a copy only where it lies otherwise."""
        stride = self.shape_only.stride()
        if tensor.stride() != stride:
            tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))
