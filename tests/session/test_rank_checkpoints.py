"""Checkpoints and exports by all ranks: files as one process writes them, which any number of ranks takes up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from tests.ranks import Team, all_well, team

Bits = Mapping[str, Any]
ROOMY: dict[str, Any] = {"host_memory": "1GiB"}


def build(seed: int = 0) -> nn.Module:
    """Blocks and a root group, a tied, a frozen and a transposed weight, random numbers and buffers."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(48, 120), nn.Dropout(0.2), nn.Linear(120, 48)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(48, 48), *blocks, nn.BatchNorm1d(48), nn.Linear(48, 48))
    model[5].weight = model[0].weight
    model[1][0].weight.requires_grad_(False)
    model[2][2].weight = nn.Parameter(model[2][2].weight.detach().t().contiguous().t())
    return model


@contextmanager
def managed(seed: int = 0, *, chunk_size: int | None = None, **arguments: Any) -> Iterator[tuple[nn.Module, Any]]:
    model = build(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = patrickstar.Options(poison=True, chunk_size=chunk_size)
    with patrickstar.manage(model, optimizer, options=options, **{**ROOMY, **arguments}) as session:
        yield model, session


def train(model: nn.Module, session: Any, steps: int) -> None:
    """The rows are drawn from torch's random numbers, as dropout is."""
    for _ in range(steps):
        model(torch.randn(4, 48)).square().mean().backward()
        session.optimizer.step()
        session.optimizer.zero_grad()


def bits_of(model: nn.Module, session: Any) -> Bits:
    states = {name: session.optimizer.state[p] for name, p in model.named_parameters() if p in session.optimizer.state}
    found: dict[str, Any] = {key: value.clone() for key, value in session.state_dict().items()}
    found |= {f"{name}/{key}": value.clone() for name, state in states.items() for key, value in state.items()}
    return {"tensors": found, "rate": session.optimizer.param_groups[0]["lr"]}


def expect_same(want: Bits, got: Bits, *, but: str = "nothing") -> None:
    assert want.keys() == got.keys()
    assert want["rate"] == got["rate"]
    assert want["tensors"].keys() == got["tensors"].keys()
    odd = [key for key, value in want["tensors"].items() if not torch.equal(value, got["tensors"][key])]
    assert not [key for key in odd if but not in key]


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> Iterator[Team]:
    with team(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def pair() -> Iterator[Team]:
    with team(2) as made:
        yield made


def save_and_go_on(rank: int, path: Path, arguments: Mapping[str, Any]) -> tuple[Bits, Bits]:
    with managed(**arguments) as (model, session):
        torch.manual_seed(rank)
        train(model, session, 2)
        session.optimizer.param_groups[0]["lr"] = 5e-3
        saved = bits_of(model, session)
        assert session.save_checkpoint(path, extra={"of": rank}) == path / "step-00000002"
        train(model, session, 2)
        return saved, bits_of(model, session)


def load(rank: int, path: Path, steps: int, arguments: Mapping[str, Any]) -> tuple[Bits, Bits]:
    with managed(5, **arguments) as (model, session):
        torch.manual_seed(rank + 70)
        train(model, session, 1)
        assert session.load_checkpoint(path) == {"of": 0}
        loaded = bits_of(model, session)
        train(model, session, steps)
        assert session.save_checkpoint(path.with_name("more"), extra={"of": 0}).name == f"step-{2 + steps:08d}"
        return loaded, bits_of(model, session)


@pytest.mark.parametrize("has_disk", [False, True], ids=["host", "disk"])
def test_ranks_that_stop_and_resume_have_the_bits_of_not_stopping(ranks: Team, has_disk: bool, tmp_path: Path) -> None:
    arguments = {"host_memory": ranks.size * (320 << 10), "disk": tmp_path} if has_disk else {}
    want = all_well(ranks.run(save_and_go_on, tmp_path / "run", arguments))
    got = all_well(ranks.run(load, tmp_path / "run", 2, arguments))
    for (saved, end), (loaded, resumed) in zip(want, got, strict=True):
        expect_same(saved, loaded, but="4.running")
        expect_same(end, resumed, but="4.running")  # each rank's own until a checkpoint has rank 0's
    assert not torch.equal(want[0][0]["tensors"]["4.running_mean"], want[1][0]["tensors"]["4.running_mean"])
    for loaded, _ in got:
        expect_same(want[0][0], loaded)


def test_a_checkpoint_knows_no_number_of_ranks(pair: Team, tmp_path: Path) -> None:
    (saved, _), _ = all_well(pair.run(save_and_go_on, tmp_path / "2", {"chunk_size": 6144}))
    others: list[tuple[int, dict[str, Any]]] = [
        (3, {"host_memory": 3 * (320 << 10), "disk": tmp_path}),
        (1, {"chunk_size": 1024, "device": "emulated", "device_memory": "96KiB"}),
        (4, {"chunk_size": 4096}),
        (2, {"chunk_size": 2048}),
    ]
    path = tmp_path / "2"
    for size, arguments in others:
        with team(size) as those:
            answers = all_well(those.run(load, path, 0, arguments))
        for loaded, same in answers:
            expect_same(saved, loaded)
            expect_same(saved, same)
        (tmp_path / "more").rename(path := tmp_path / f"again {size}")
