"""The records of all that a binding binds: parameters, and the tiles of those that have some."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from patrickstar.core.layout import Layout
from patrickstar.core.strides import contiguous_strides, dense_strides
from patrickstar.parameters.bound import BoundParameter

__all__ = ["make_records", "names_by_id", "with_tiles"]


def names_by_id(named: Mapping[str, Tensor]) -> dict[int, str]:
    """The name of each of these tensors, by its identity: parameters compare by element, and hooks and optimizers know no names."""
    return {id(tensor): name for name, tensor in named.items()}


def make_records(
    named: Mapping[str, nn.Parameter],
    layout: Layout,
    *,
    dtypes: Mapping[str, torch.dtype],
    copied: Collection[str],
    gathers_rows: bool = False,
) -> dict[str, BoundParameter]:
    """The records by name: of each parameter, and after it of its tiles.

    Args:
        dtypes: what parameters are of while they are managed; fp32 where it says nothing. copied: those whose uses see a copy.
        gathers_rows: whether lookups in tables bring rows from where these rest.
    """
    nans: dict[torch.dtype, Tensor] = {}
    records: dict[str, BoundParameter] = {}
    for name, parameter in named.items():
        dtype = dtypes.get(name, torch.float32)
        if dtype not in nans:
            nans[dtype] = torch.full((), float("nan"), dtype=dtype, device=parameter.device)
        is_table = layout.is_table(layout.slices[name].chunk)
        tiles = _tiles(name, parameter, layout, nan=nans[dtype], is_copied=name in copied)
        records[name] = BoundParameter(
            name,
            name,
            partial(_itself, parameter),
            layout.weight_units(name),
            layout.slices[name].offset,
            torch.empty_strided(
                parameter.shape,
                contiguous_strides(parameter.shape) if tiles else dense_strides(parameter.shape, parameter.stride()),
                dtype=dtype,
                device="meta",
            ),
            nans[dtype].expand(parameter.shape),
            # The whole of what lies in tiles is put together where it is asked for.
            is_copied=name in copied or bool(tiles),
            tiles=tiles,
            is_table=is_table,
            by_rows=is_table and gathers_rows,
        )
        records.update((tile.name, tile) for tile in tiles)
    return records


def with_tiles(records: Mapping[str, BoundParameter], names: Iterable[str]) -> list[BoundParameter]:
    """All whose values change where those of these parameters or tiles do: a parameter's tiles, and the parameter that a tile is of."""
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
            partial(_itself, leaf),
            layout.weight_units(label),
            place.offset,
            shape_only,
            standin,
            is_copied=is_copied,
            first_row=place.tensor_start // row_numel,
        )
        tiles.append(tile)
    return tuple(tiles)


def _itself(parameter: nn.Parameter) -> nn.Parameter:
    return parameter
