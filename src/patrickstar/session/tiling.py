"""Which weights lie in tiles, and which are tables."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from patrickstar.errors import LayoutError
from patrickstar.parameters.bound import names_by_id
from patrickstar.parameters.tiles import NOT_ONE_TENSOR

__all__ = ["find_tables", "find_tiles"]


def find_tables(model: nn.Module, named: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """The weights of embeddings that no linear shares, by name.

    Raises:
        LayoutError: one has hooks, which a gradient of rows would not call.
    """
    names = names_by_id(named)
    linears = {id(module._parameters.get("weight")) for module in model.modules() if isinstance(module, nn.Linear)}
    tables = set()
    for module in model.modules():
        weight = module._parameters.get("weight") if isinstance(module, nn.Embedding) else None
        if weight is None or id(weight) in linears or weight.shape[0] < 2 or not weight.numel():
            continue
        _expect_no_hooks(names[id(weight)], weight, "would be used by rows")
        tables.add(names[id(weight)])
    return frozenset(tables)


def _expect_no_hooks(name: str, weight: nn.Parameter, use: str) -> None:
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        raise LayoutError(f"{name} has hooks, and {use}: {NOT_ONE_TENSOR}")


def find_tiles(model: nn.Module, named: Mapping[str, nn.Parameter], rows: int | None) -> dict[str, int]:
    """Elements of a tile, by name, of the weights of linears and embeddings that have more rows than this; None: no weight has tiles.

    The output of `nn.MultiheadAttention` has none: torch uses its weight inside of one operation for the whole attention.

    Raises:
        LayoutError: such a weight has hooks, which a gradient that comes in tiles would not call.
    """
    if rows is None:
        return {}
    names = names_by_id(named)
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    not_called = {part for attention in attentions for part in attention.modules()}
    tiles = {}
    for module in model.modules():
        has_some = isinstance(module, nn.Linear | nn.Embedding) and module not in not_called
        weight = module._parameters.get("weight") if has_some else None
        if weight is None or weight.shape[0] <= rows or not weight.numel():
            continue
        name = names[id(weight)]
        _expect_no_hooks(name, weight, f"would be used in tiles of {rows} rows")
        tiles[name] = rows * (weight.numel() // weight.shape[0])
    return tiles
