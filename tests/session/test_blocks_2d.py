"""A model in q x q blocks under management: as one process trains it, whatever the budget; whole tensors, checkpoints, faults."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import patrickstar
from patrickstar.errors import ConfigError, DeviceError, RankError
from patrickstar.memory.fileio import FileIO
from patrickstar.parallel import ContextParallel, Tensor2D
from tests.parallel.programs_of_2d import batch_of, gpt2, llama
from tests.ranks import Ended, Team, Teams, all_well, kill_me, team

STEPS = 4
ROOMY, TIGHT = "8MiB", "150KiB"
MODELS: dict[str, Callable[[int], nn.Module]] = {"gpt2": gpt2, "llama": llama}
NAMES = ("dp", "row", "col")
_meshes: dict[tuple[int, ...], DeviceMesh] = {}


@pytest.fixture
def four(team_of: Teams) -> Team:
    return team_of(4)


def mesh_of(*shape: int) -> DeviceMesh:
    """The mesh, made once: a process that is kept would make groups again and again."""
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    return _meshes[shape]


def build(name: str, seed: int = 0) -> nn.Module:
    """A small model whose vectors differ element by element."""
    torch.manual_seed(seed)
    model = MODELS[name](2)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.3)
    return model


def batches(groups: int) -> list[list[dict[str, Tensor]]]:
    """Batches of an odd number of rows, step by step, of each group."""
    torch.manual_seed(5)
    return [[batch_of(5) for _ in range(groups)] for _ in range(2 * STEPS)]


@contextmanager
def managed(name: str, groups: int = 1, seed: int = 0, **arguments: Any) -> Any:
    mesh, model = mesh_of(groups, 2, 2), build(name, seed)
    tp = Tensor2D(mesh["row", "col"])
    optimizer = torch.optim.AdamW(tp.parallelize(model).parameters(), lr=1e-2)
    with patrickstar.manage(model, optimizer, mesh=mesh, **{"device": "cpu", "precision": "fp32"} | arguments) as session:
        yield tp, model, session


def whole_states(session: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in session.state_dict().items()}


def steps(tp: Tensor2D, model: nn.Module, session: Any, taken: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Losses, norms and gradients of some steps."""
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}}
    for batch in taken:
        loss = model(**tp.shard(batch)).loss
        session.scaler.scale(loss).backward()
        if session.scaler.is_enabled():
            session.scaler.unscale_(session.optimizer)
        found["gradients"] = found["gradients"] or dict(session.gradients())
        found["norms"].append(session.clip_grad_norm_(0.5).item())
        session.scaler.step(session.optimizer)
        session.scaler.update()
        session.optimizer.zero_grad()
        found["losses"].append(loss.item())
    return found


def train(rank: int, name: str, groups: int, budget: str) -> dict[str, Any]:
    """Steps under a budget, what was moved, and whole weights at the end."""
    memory = {"device": "emulated", "device_memory": budget, "host_memory": "64MiB"}
    with managed(name, groups, **memory) as (tp, model, session):
        found = steps(tp, model, session, [of_all[rank // 4] for of_all in batches(groups)[:STEPS]])
        found["weights"], stats = whole_states(session), session.stats()
    left = dict(tp.state_dict(model))
    assert all(torch.equal(found["weights"][name], value) for name, value in left.items())
    return found | {"planned": stats.planned_steps, "moved": stats.moved["H>D"]}


def plain(name: str, groups: int) -> dict[str, Any]:
    """The same by one process with the batches of all groups: losses by step and group."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}}
    for of_all in batches(groups)[:STEPS]:
        each = [model(**batch).loss for batch in of_all]
        (sum(each) / groups).backward()
        found["gradients"] = found["gradients"] or {n: p.grad.clone() for n, p in model.named_parameters()}
        found["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append([loss.item() for loss in each])
    return found | {"weights": model.state_dict()}


def expect_trained_as_one(ranks: Team, name: str, groups: int, tight: str) -> None:
    want = plain(name, groups)
    roomy, again = (all_well(ranks.run(train, name, groups, budget)) for budget in (ROOMY, tight))
    for rank, (found, moving) in enumerate(zip(roomy, again, strict=True)):
        assert found["losses"] == pytest.approx([of_all[rank // 4] for of_all in want["losses"]], abs=2e-5)
        assert found["norms"] == pytest.approx(want["norms"], rel=1e-6)
        assert found["norms"] == moving["norms"] == roomy[0]["norms"]
        assert found["losses"] == moving["losses"]
        assert found["planned"] == moving["planned"] == STEPS
        assert found["moved"] == 0 < moving["moved"]
        for what, most in (("gradients", 1e-6), ("weights", 2e-4)):
            assert found[what].keys() == want[what].keys()
            for key, value in want[what].items():
                assert torch.equal(found[what][key], moving[what][key]), key
                assert (found[what][key] - value).abs().max() < most, key


@pytest.mark.parametrize("name", MODELS)
def test_blocks_train_as_one_process_with_the_same_bits_under_any_budget(four: Team, name: str) -> None:
    """Losses, the norm for clipping, whole gradients and whole weights."""
    expect_trained_as_one(four, name, 1, TIGHT)


@pytest.mark.campaign
@pytest.mark.parametrize("name", MODELS)
def test_grids_of_blocks_that_have_batches_of_their_own_train_as_one_process(name: str) -> None:
    with team(8) as ranks:
        expect_trained_as_one(ranks, name, 2, "180KiB")
