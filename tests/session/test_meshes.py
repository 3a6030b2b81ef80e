"""`mesh=`: the ranks of its dimension "dp" share the model, so that several sessions have groups of their own in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import patrickstar
from patrickstar.errors import ConfigError
from tests.ranks import Teams, all_well, team
from tests.session.test_faults_of_ranks import managed
from tests.session.test_ranks import STEPS, build, loss_of, plain


def groups_of_their_own(rank: int) -> list[Any]:
    """Two models, each over another pair of ranks, and one over all four: steps by turns, and a session that is closed before the others."""
    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    columns = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("pp", "dp"))["dp"]
    found = []
    with (
        managed("mlp", mesh=rows) as (mlp, first),
        managed("experts", mesh=columns) as (experts, second),
        managed("tied", mesh=DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))) as (tied, third),
    ):
        places = (mlp, first, rows), (experts, second, columns), (tied, third, None)
        for step in range(STEPS):
            for model, session, mesh in places:
                loss_of(model, rank if mesh is None else mesh.get_local_rank(), step).backward()
                session.optimizer.step()
                session.optimizer.zero_grad()
        found = [{name: t.clone() for name, t in session.state_dict().items()} for _, session, _ in places]
        second.close()
        loss_of(mlp, rank, STEPS).backward()
    return found


def test_sessions_of_one_process_have_groups_of_their_own(team_of: Teams) -> None:
    for found in all_well(team_of(4).run(groups_of_their_own)):
        for weights, name, size in zip(found, ("mlp", "experts", "tied"), (2, 2, 4), strict=True):
            want = plain(name, size)["weights"]
            assert all(torch.equal(weights[key], value) for key, value in want.items()), name


def refusals(rank: int) -> list[str]:
    """What `manage` says to meshes that it does not take; the last one after the process group has gone."""
    refused = [
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        init_device_mesh("cpu", (4,)),
        DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)),
        DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",)),
    ]
    said = [refusal(mesh) for mesh in (refused if rank > 1 else refused[:3])[:4]]
    dist.destroy_process_group()
    return [*said, refusal(refused[-1])]


def refusal(mesh: DeviceMesh) -> str:
    model = build("mlp")
    with pytest.raises(ConfigError) as refused:
        patrickstar.manage(model, torch.optim.AdamW(model.parameters()), mesh=mesh)
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    return str(refused.value)


def test_meshes_that_cannot_be_meant_are_refused() -> None:
    with team(4) as ranks:
        answers = all_well(ranks.run(refusals))
    for rank, (other, hybrid, unnamed, *beyond, gone) in enumerate(answers):
        assert '"tp" comes later. Give mesh["dp"]' in other
        assert 'a mesh with the dimension "dp"' in hybrid
        assert '"replicate" comes later' in hybrid
        assert '"shard" comes later' in hybrid
        assert 'a mesh with the dimension "dp"' in unnamed
        assert "mesh= without a process group" in gone
        assert [f"rank {rank}, is not in it" in text for text in beyond] == [True] * (rank > 1)
