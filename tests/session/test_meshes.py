"""`mesh=`: the ranks of its dimension "dp" share the model, so that several sessions have groups of their own in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import patrickstar
from patrickstar.errors import ConfigError
from tests.ranks import Team, all_well, team
from tests.session.test_ranks import DEFAULTS, STEPS, build, loss_of, plain


def groups_of_their_own(rank: int) -> list[Any]:
    """Two models, each over another pair of ranks, and one over all four: steps by turns, and a session that is closed before the others."""
    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    columns = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("pp", "dp"))["dp"]
    found = []
    with (
        session_of("mlp", rows) as (mlp, first),
        session_of("experts", columns) as (experts, second),
        session_of("tied", DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))) as (tied, third),
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


class session_of:  # noqa: N801  (read as a function)
    def __init__(self, name: str, mesh: DeviceMesh) -> None:
        self.model = build(name)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.session = patrickstar.manage(self.model, optimizer, mesh=mesh, **DEFAULTS)

    def __enter__(self) -> tuple[Any, Any]:
        return self.model, self.session

    def __exit__(self, *_: object) -> None:
        self.session.close()


def test_sessions_of_one_process_have_groups_of_their_own(four: Team) -> None:
    for found in all_well(four.run(groups_of_their_own)):
        for weights, name, size in zip(found, ("mlp", "experts", "tied"), (2, 2, 4), strict=True):
            want = plain(name, size)["weights"]
            assert all(torch.equal(weights[key], value) for key, value in want.items()), name


def refusals(rank: int) -> list[str]:
    """What `manage` says to meshes that it does not take; the last one after the process group has gone."""
    refused = [
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")),
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
    for rank, (cp, hybrid, unnamed, *beyond, gone) in enumerate(answers):
        assert '"cp" comes later. Give mesh["dp"]' in cp
        assert 'a mesh with the dimension "dp"' in hybrid
        assert '"replicate" comes later' in hybrid
        assert '"shard" comes later' in hybrid
        assert 'a mesh with the dimension "dp"' in unnamed
        assert "mesh= without a process group" in gone
        assert [f"rank {rank}, is not in it" in text for text in beyond] == [True] * (rank > 1)
