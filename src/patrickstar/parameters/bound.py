"""Records of parameters under management: where the bytes of each are, and whose the bytes of a unit are."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from patrickstar.core.layout import Layout, Part
from patrickstar.core.planes import PlaneRef
from patrickstar.core.shard_layout import ShardLayout
from patrickstar.core.strides import contiguous_strides, dense_strides
from patrickstar.core.trace import Touch
from patrickstar.memory.leases import AssembledKey, CopyKey, WeightKey
from patrickstar.plan.touches import gradient_parts
from patrickstar.torch_private import refuse_reads


@dataclass(frozen=True, slots=True, eq=False)
class BoundParameter:
    """A parameter, and where its bytes are.

    `shape_only` is a meta tensor with the parameter's shape and strides; `offset` is in elements from the start of the first of the units that it
    lies in, which are one but for a parameter in tiles. Dense parameters keep their strides (channels last, say), others and those in tiles are
    contiguous. `tensor` gives the parameter, or a detached alias of it (Note [Binding]); `alive` is the parameter, so that the record keeps it
    alive, and None for an alias, which nothing of ours keeps alive.

    Attributes:
        key: what is leased at a use: the unit, or the copy of this parameter. touches: the units that a use touches.
        view: shape, strides and start of the parameter's values in the 1-D tensor that is leased.
        arrivals: the moments in which a gradient is kept, and the piece of it that each is about.
    """

    name: str
    owner: str
    """The parameter's name; for a tile, the name of the parameter that the tile is of."""
    tensor: Callable[[], Tensor]
    alive: nn.Parameter | None
    refs: tuple[PlaneRef, ...]
    offset: int
    shape_only: Tensor

    standin: Tensor
    is_copied: bool = False
    """True where uses see a copy in the type that computes (Note [Copies] in `memory/leases.py`), not what is kept."""
    tiles: tuple[BoundParameter, ...] = ()
    """The records of the parameter's tiles (Note [Tiles] in `tiles.py`)."""
    first_row: int = 0
    """The row of its parameter that a tile begins with; else 0."""
    is_detached: bool = False
    """True for the record of a detached alias."""
    arrivals: Sequence[tuple[Part, Sequence[Touch]]] = ()
    group: str | None = None
    """Over ranks: the chunks that are gathered for a use, in which `offset` counts."""

    key: WeightKey = field(init=False)
    touches: tuple[Touch, ...] = field(init=False)
    view: tuple[Sequence[int], Sequence[int], int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        is_alone = self.is_copied and self.group is None
        view = self.shape_only.shape, self.shape_only.stride(), 0 if is_alone else self.offset
        key = self.group if self.group is not None else self.name if self.is_copied else self.ref
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "touches", tuple(map(Touch, sorted(self.refs))))
        object.__setattr__(self, "view", view)

    @property
    def ref(self) -> PlaneRef:
        """The unit that the parameter lies in; for one in tiles, the first."""
        return self.refs[0]

    @property
    def rows(self) -> int:
        """Number of rows of a tile, or of a parameter in tiles."""
        return int(self.shape_only.shape[0])

    def of(self, whole: Tensor) -> Tensor:
        """A tile's rows of a tensor of its parameter's shape."""
        return whole[self.first_row : self.first_row + self.rows]

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself."""
        return self.tensor()  # type: ignore[return-value]  # asked for while it, or an alias of it, is in use

    def over(self, leased: Tensor) -> Tensor:
        """The parameter's values in the 1-D tensor that is leased at a use."""
        return torch.as_strided(leased, *self.view)

    def flat(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape as 1-D, in the order in which the parameter lies in its slot; a copy only where it lies otherwise."""
        stride = self.shape_only.stride()
        if tensor.stride() != stride:
            tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))


class Owner(Protocol):
    """The owner of the bytes: `Events` for a session, or the twin of a trial run, which only writes down what is asked for.

    What one who inherits from this leaves out does nothing.
    """

    session_name: str = "a session"  # as messages call it

    def use(self, label: str, touches: Sequence[Touch]) -> None:
        """Makes the units of a use resident, all at once; `label` is the first parameter's name. BudgetError where they cannot be."""

    def carry_out_pending(self) -> None:
        """Does what was asked for and is still to be done: a view, held all the time, is about to be used."""

    def unpack(self, label: str, touches: Sequence[Touch]) -> None:
        """Makes units resident for a backward that needs what uses have saved, all at once."""

    def renew(self, key: str | AssembledKey, copy: Tensor) -> None:
        """Writes a parameter's changed value, or what has changed of what is kept of it, into a copy that is still held."""

    def updated(self) -> None:
        """Notes that the library has written parameters: an update, a value that was loaded."""

    def thawed(self, name: str) -> None:
        """Makes room for training a parameter that was frozen. BudgetError where there is none; the parameter stays frozen then."""

    def changed(self, key: WeightKey) -> None:
        """Notes that a weight unit's or copy's bytes, still held, were written in place. See Note [Changes in place] in `changes.py`."""

    def escaped(self, key: WeightKey) -> None:
        """Notes that memory of a weight unit, or of a copy, has been handed out to code that can write to it unseen."""

    def gradient(self, name: str, gradient: Tensor | None) -> None:
        """Takes a gradient that has arrived in backward; None: it was added to one of the user's own, which stays where it is."""

    def has_gradient(self, name: str) -> bool:
        """Tells whether a parameter has a gradient."""

    def is_spent(self, name: str) -> bool:
        """Tells whether the gradient of a parameter has been used as it came, and nobody has zeroed it since."""

    def drop_gradient(self, name: str) -> None:
        """Drops the gradient accumulated so far, which is no longer wanted."""

    def make_copy(self, key: CopyKey) -> Tensor:
        """A 1-D tensor with a parameter's value, whose units are resident, or what is kept of one, put together. BudgetError: it does not fit."""

    def settle(self) -> None:
        """Does what is pending: state is about to be read or written."""

    def expect_room(self, key: AssembledKey) -> None:
        """Raises BudgetError where there is no room to put this tensor together, alone."""

    def assembled_changed(self, key: AssembledKey, *, wholly: bool) -> None:
        """Takes a change, in place, of a tensor that was put together. `wholly`: every element was written, with other bits or not."""


def placeholder(dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """A NaN whose memory nobody can read: what is expanded from it stands for values that lie in chunks."""
    nan = torch.full((), float("nan"), dtype=dtype, device=device)
    if type(nan) is Tensor:
        refuse_reads(nan)
    return nan


def names_by_id(named: Mapping[str, Tensor]) -> dict[int, str]:
    """The name of each of these tensors, by `id()`: parameters compare by element, and hooks and optimizers know no names."""
    return {id(tensor): name for name, tensor in named.items()}


def make_records(
    named: Mapping[str, nn.Parameter],
    layout: Layout,
    *,
    dtypes: Mapping[str, torch.dtype],
    copied: Collection[str],
    device: torch.device | None,
    strides: Mapping[str, Sequence[int]],
) -> dict[str, BoundParameter]:
    """Records by name: of each parameter, and after it of its tiles. What is given is as `Binding` has it."""
    nans: dict[torch.dtype, Tensor] = {}
    shards = layout if isinstance(layout, ShardLayout) else None
    records: dict[str, BoundParameter] = {}
    for name, parameter in named.items():
        dtype = dtypes.get(name, torch.float32)
        if dtype not in nans:
            nans[dtype] = placeholder(dtype, device or parameter.device)
        tiles = _tiles(name, parameter, layout, nan=nans[dtype], is_copied=name in copied)
        shape = parameter.shape
        stride = contiguous_strides(shape) if tiles else dense_strides(shape, strides.get(name) or parameter.stride())
        records[name] = BoundParameter(
            name,
            name,
            weakref.ref(parameter),  # type: ignore[arg-type]  # which the record, or the model, keeps alive
            parameter,
            layout.weight_units(name),
            shards.offset(name) if shards is not None else layout.slices[name].offset,
            torch.empty_strided(shape, stride, dtype=dtype, device="meta"),
            nans[dtype].expand(shape),
            # The whole of what lies in tiles is put together where it is asked for.
            is_copied=name in copied or bool(tiles),
            tiles=tiles,
            arrivals=tuple(gradient_parts(layout, name, writes=True)),
            group=None if shards is None else shards.group(name),
        )
        records.update((tile.name, tile) for tile in tiles)
    return records


def with_tiles(records: Mapping[str, BoundParameter], names: Iterable[str]) -> list[BoundParameter]:
    """The records of all whose values change with those of these parameters or tiles: tiles of a parameter, the parameter of a tile."""
    changed = [records[name] for name in names]
    found = [record for bound in changed for record in (bound, *bound.tiles)]
    owners = {bound.owner for bound in changed if bound.owner != bound.name}
    return [*found, *(records[name] for name in sorted(owners))]


def _tiles(
    name: str, parameter: nn.Parameter, layout: Layout, *, nan: Tensor, is_copied: bool
) -> tuple[BoundParameter, ...]:
    tiles = []
    for label in layout.leaves(name) if layout.slices[name].tiles else ():
        place = layout.tiles(label)[0]
        row_numel = math.prod(parameter.shape[1:])
        shape = (place.numel // row_numel, *parameter.shape[1:])
        standin = nan.expand(shape)
        leaf = nn.Parameter(torch.empty_like(nan), requires_grad=parameter.requires_grad)
        leaf.data = standin  # not made of it: tiles would have one version counter
        shape_only = torch.empty(shape, dtype=nan.dtype, device="meta")
        tile = BoundParameter(
            label,
            name,
            weakref.ref(leaf),  # type: ignore[arg-type]
            leaf,
            layout.weight_units(label),
            place.offset,
            shape_only,
            standin,
            is_copied=is_copied,
            first_row=place.tensor_start // row_numel,
            arrivals=tuple(gradient_parts(layout, label, writes=True)),
        )
        tiles.append(tile)
    return tuple(tiles)
