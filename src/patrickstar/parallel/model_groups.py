"""The groups of ranks that a model works together with."""

from __future__ import annotations

from torch import nn

from patrickstar.config.kinds import refuse
from patrickstar.parallel.group import MeshGroup
from patrickstar.parallel.tensor_2d import grid_of
from patrickstar.parallel.transformer_models import Parallelized


def groups_of(model: nn.Module) -> dict[str, MeshGroup]:
    """The groups, by the mesh's dimension: none of a model that is not cut. ConfigError: gradients are for others to average."""
    grid, ours = grid_of(model), Parallelized.part_of(model)
    if ours is not None and ours.over.gradients == "mean":
        refuse(['gradients="mean" is for DDP and FSDP2, which average: leave it out under manage()'], of="manage")
    lines = () if grid is None else (grid.rows, grid.cols)
    return {group.name: group for group in (*lines, *(() if ours is None else (ours.over.group,)))}
