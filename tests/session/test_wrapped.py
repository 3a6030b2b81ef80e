"""DDP or FSDP around a managed model, or a managed one inside of them: an error names what it is, before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import patrickstar
from patrickstar.errors import StateError
from tests.ranks import Team, all_well
from tests.session.test_ranks import DEFAULTS, build, loss_of, plain


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    return model


def flat(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def a_part(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(nn.Sequential(model, nn.Linear(48, 48)))


def without_sync(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, init_sync=False)


def prepared(model: nn.Module) -> nn.Module:
    """As Accelerate's `prepare` does it, and transformers' `Trainer` with it."""
    rank = torch.distributed.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    try:
        from accelerate import Accelerator

        wrapped = Accelerator(cpu=True).prepare(model)
        assert wrapped is not model, "nothing was wrapped"
        return wrapped
    finally:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]


Wraps = tuple[Callable[[nn.Module], nn.Module], ...]


def around(rank: int, wraps: Wraps, first: bool) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The errors where a model is wrapped after `manage`, or by `first` before it, and called; and the weights after steps without wrappers."""
    model = build("mlp")
    wrapped, said = [wrap(model) for wrap in wraps if first], list[str]()
    with patrickstar.manage(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **DEFAULTS) as session:
        for wrap in wraps:
            with pytest.raises(StateError) as refused:
                loss_of(wrapped[0] if first else wrap(model), rank, 0).backward()
            said.append(str(refused.value))
        if sharded in wraps:
            return said, {}  # whose hooks stay on the model
        for step in range(3):
            loss_of(model, rank, step).backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
        return said, {name: value.clone() for name, value in session.state_dict().items()}


@pytest.mark.parametrize(
    ("wraps", "first", "named"),
    [
        ((without_sync, DistributedDataParallel, prepared), False, "DistributedDataParallel, around a managed model"),
        pytest.param(
            (DistributedDataParallel,),
            True,
            "Sequential was called by DistributedDataParallel",
            marks=pytest.mark.campaign,
        ),
        ((a_part,), True, "Sequential was called by DistributedDataParallel"),
        pytest.param((flat,), False, "by FSDP, around a managed model", marks=pytest.mark.campaign),
        ((sharded,), False, "by FSDP, around a managed model"),
    ],
    ids=["after", "before", "a part", "FSDP", "FSDP2"],
)
def test_a_wrapper_around_a_managed_model_is_refused_before_anything_is_changed(
    two: Team, wraps: Wraps, first: bool, named: str
) -> None:
    if prepared in wraps:
        pytest.importorskip("accelerate")
    want = plain("mlp", 2)["weights"]
    for said, weights in all_well(two.run(around, wraps, first)):
        assert len(said) == len(wraps)
        for text in said:
            assert named in text or "Sequential was called by DistributedDataParallel" in text
            assert "Give manage() the bare model, call that one, and give Accelerate's prepare() loaders only" in text
        assert sharded in wraps or all(torch.equal(weights[name], value) for name, value in want.items())


def managed_inside(rank: int, wrap: Callable[[nn.Module], nn.Module], part: bool) -> str:
    wrapped = wrap(build("mlp"))
    model = nn.Sequential(nn.Linear(48, 48), wrapped) if part else wrapped
    before: dict[str, Any] = dict(model.named_parameters())
    with pytest.raises(StateError) as refused:
        patrickstar.manage(model, torch.optim.AdamW(model.parameters()), **DEFAULTS)
    assert all(value is before[name] for name, value in model.named_parameters())
    return str(refused.value)


@pytest.mark.parametrize(
    ("wrap", "named"),
    [
        (DistributedDataParallel, "is a DistributedDataParallel of torch.nn.parallel.distributed"),
        (flat, "is a FullyShardedDataParallel of torch.distributed.fsdp"),
        (sharded, "is a FSDPSequential of torch.distributed.fsdp"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("part", [False, True])
def test_a_wrapped_model_is_refused_by_manage(
    two: Team, wrap: Callable[[nn.Module], nn.Module], named: str, part: bool
) -> None:
    for said in all_well(two.run(managed_inside, wrap, part)):
        assert ("1 " if part else "the model ") + named in said
        assert "Give manage() the bare model" in said
