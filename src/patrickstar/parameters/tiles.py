"""Linears and lookups tile by tile.

Note [Tiles]
    A weight in tiles need not be resident as a whole: rows of it lie in units of their own. For autograd each tile is a leaf with a gradient of
    its own, so that neither the weight nor its gradient is ever one tensor. `linear` multiplies with one tile after the other, and its results
    are put together; a lookup asks every tile for its rows. All other uses see a copy of the whole (Note [Copies] in `memory/leases.py`), and the
    gradient of such a use is the whole parameter's.
    Products of other shapes may have other bits: what it equals is plain PyTorch that multiplies with the same rows at a time. A lookup has the
    bits of an ordinary one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import embedding, linear

from patrickstar.parameters.bound import BoundParameter
from patrickstar.parameters.functions import Args, Function, Kwargs

TILED: Final = frozenset({linear, embedding})
"""The functions that may go tile by tile."""

NOT_ONE_TENSOR: Final = (
    "its gradient never exists as one tensor. Use backward() and session.gradients(), or leave out Options(tile_rows=)"
)

# What a lookup by tiles can be asked for beside its padding: nothing.
_PLAIN_LOOKUP: Final = (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False))


def tile_by_tile(func: Function, args: Args, kwargs: Kwargs, *, tiled: Mapping[int, BoundParameter]) -> Tensor | None:
    """The result of a linear or lookup whose weight is in tiles; None where its weight is not, or where it is asked for more.

    `func`, `args`, `kwargs`: one of `TILED`, as torch's override protocol gives it. `tiled`: the records of parameters in tiles, by `id()`.
    """
    weight = tiled.get(id(args[1] if len(args) > 1 else kwargs.get("weight")))
    if weight is None:
        return None
    tiles = weight.tiles
    names = ("input", "weight", "bias" if func is linear else "padding_idx")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if func is linear:
        return _linear(tiles, given["input"], given.get("bias"))
    if any(given.get(name, plain) != plain for name, plain in _PLAIN_LOOKUP):
        return None
    padding = given.get("padding_idx")
    if padding is not None and padding < 0:
        padding += weight.rows
    return _lookup(tiles, given["input"], padding)


def _linear(tiles: Sequence[BoundParameter], features: Tensor, bias: Tensor | None) -> Tensor:
    biases = [None] * len(tiles) if bias is None else bias.split([tile.rows for tile in tiles])
    return torch.cat([linear(features, tile.parameter, part) for tile, part in zip(tiles, biases, strict=True)], -1)


def _lookup(tiles: Sequence[BoundParameter], ids: Tensor, padding: int | None) -> Tensor:
    total = tiles[-1].first_row + tiles[-1].rows
    _expect_inside(ids, total)
    found: Tensor | None = None
    for tile in tiles:
        # Every id is looked up in every tile, in its nearest row: shapes do not depend on values, and what is not used gets a gradient of zeros.
        local = ids - tile.first_row
        own = padding - tile.first_row if padding is not None and 0 <= padding - tile.first_row < tile.rows else None
        values = embedding(local.clamp(0, tile.rows - 1), tile.parameter, own)
        inside = ((local >= 0) & (local < tile.rows)).unsqueeze(-1)
        found = values if found is None else torch.where(inside, values, found)
    assert found is not None
    return found


def _expect_inside(ids: Tensor, rows: int) -> None:
    """Raises IndexError where an id is not a row of a table of so many. Fake ids, whose values nobody knows, cost the same."""
    is_outside = ((ids < 0) | (ids >= rows)).any()
    if not isinstance(ids, FakeTensor) and bool(is_outside):
        raise IndexError(f"index out of range in self: a table of {rows} rows")
