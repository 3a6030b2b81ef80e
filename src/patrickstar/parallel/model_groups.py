"""The groups of ranks that a model works together with."""

from __future__ import annotations

from torch import nn

from patrickstar.parallel.group import MeshGroup
from patrickstar.parallel.tensor_2d import grid_of
from patrickstar.parallel.transformer_models import works_together_over


def groups_of(model: nn.Module) -> dict[str, MeshGroup]:
    """The groups, by the mesh's dimension: none of a model that is not cut. Raises as `works_together_over` does."""
    grid = grid_of(model)
    return {**works_together_over(model), **({} if grid is None else grid.lines)}
