"""`initialize_engine` on several ranks: the loop of one, and the bits of one process that adds the gradients of all."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patrickstar import engine as engines
from patrickstar.errors import ConfigError
from patrickstar.runtime import initialize_engine
from tests.ranks import Team, all_well

MICRO, PARTS, STEPS, RANKS = 2, 2, 3, 2
CONFIG: dict[str, Any] = {
    "train_batch_size": MICRO * PARTS * RANKS,
    "train_micro_batch_size_per_gpu": MICRO,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "steps_per_print": 1,
    "patrickstar": {"device": "cpu", "host_memory": "1GiB"},
}


class Net(nn.Module):
    """A model that gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) - x).square().mean()


def rows(rank: int, step: int, part: int) -> Tensor:
    return torch.randn(MICRO, 48, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))


def train(rank: int) -> tuple[dict[str, Tensor], int, int]:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(model_func=Net, local_rank=rank, config=CONFIG)
    for step in range(STEPS):
        for part in range(PARTS):
            optimizer.zero_grad()
            engine.backward(engine(rows(rank, step, part)))
            optimizer.step()
    weights = {name: value.clone() for name, value in engine.state_dict().items()}
    updates = engine.session.stats().steps
    engine.close()
    return weights, updates, engine.gradient_accumulation_steps()


def test_the_loop_has_the_bits_of_one_process_with_all_gradients(two: Team) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(STEPS):
        for part in range(PARTS):
            losses = [model(rows(rank, step, part)) / PARTS for rank in range(RANKS)]
            first, *others = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
            for parameter, *gradients in zip(model.parameters(), first, *others, strict=True):
                mean = sum(gradients[1:], gradients[0]) * (1.0 / RANKS)
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        optimizer.step()
        optimizer.zero_grad()
    for weights, updates, accumulate in all_well(two.run(train)):
        assert (updates, accumulate) == (STEPS, PARTS)
        for name, value in model.named_parameters():
            assert torch.equal(weights[name], value), name


def refused(rank: int, given: dict[str, Any]) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    initialize_engine(**{"model_func": Net, "local_rank": -1, "config": CONFIG, **given})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"config": {**CONFIG, "train_batch_size": 6}}, "= 2 x 1 x 2 ranks: write 4"),
        ({"local_rank": 3}, "local_rank=3: expected "),
    ],
)
def test_what_does_not_go_with_these_ranks_is_refused_on_all(two: Team, given: dict[str, Any], why: str) -> None:
    for answer in two.run(refused, given):
        assert isinstance(answer, ConfigError)
        assert why in str(answer)


def test_under_torchrun_a_process_group_is_made_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(engines, "begin_process_group", lambda: made.append("group"))
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for size in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(ConfigError, match="gave a str"):
            initialize_engine(lambda: "model")  # type: ignore[arg-type, return-value]
        assert made == ["group"] * (size == "2")
