"""What a forecast says is what a session does: the plans of its first step, and of the one that repeats itself, action by action.

It fails when a pass is added to one side only: a forecast and a session ask one planner (`plan/planner.py`), each in its own order of time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import patrickstar
from patrickstar.plan import planner
from patrickstar.plan.planner import Draft, Planner
from patrickstar.session.forecast import Forecast, forecast
from tests.parity.forecasts import expect_forecast, steps_of
from tests.session.builders import MACHINES, options

MACHINE_NAMES = ("roomy", *MACHINES)
STEPS = ("deferred", "clipped", "in_backward")


class Random(nn.Module):
    """Linear layers of random widths, with a loss of its own; some share a weight, some are frozen."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        widths = [32, *(draw.choice((16, 32, 48)) for _ in range(draw.randrange(2, 7))), 32]
        self.layers = nn.ModuleList(nn.Linear(one, other) for one, other in zip(widths, widths[1:], strict=False))
        for layer in self.layers:
            layer.requires_grad_(draw.random() < 0.9)
        self.layers[0].requires_grad_(True)
        self.head = nn.Linear(32, 32, bias=False)
        if draw.random() < 0.3 and self.layers[-1].weight.shape == (32, 32):
            self.head.weight = self.layers[-1].weight

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": self.head(x).square().mean()}


def arguments_of(name: str, step: str, precision: str, disk: Path) -> dict[str, Any]:
    budgets = {"device": "emulated", "device_memory": "64MiB"} if name == "roomy" else MACHINES[name](disk)
    way = "in_backward" if step == "in_backward" else "deferred"
    return {**budgets, "step": way, "precision": precision, "options": options()}


def _trained(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.requires_grad)


def compare(
    seed: int, machine: str, step: str, precision: str, disk: Path, *, between: Callable[[], None] = lambda: None
) -> Forecast:
    batch, arguments = torch.randn(4, 32), arguments_of(machine, step, precision, disk)
    clips = step == "clipped"
    found = forecast(Random(seed), {"x": batch}, clip=clips, **arguments)
    between()
    model = Random(seed)

    def train() -> None:
        model(batch)["loss"].backward()
        if clips:
            session.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    try:
        with patrickstar.manage(model, torch.optim.AdamW(_trained(model)), **arguments) as session:
            optimizer: Any = session.optimizer
            expect_forecast(found, session, steps_of(session, train))
    except patrickstar.BudgetError:
        assert not found.fits
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("machine", MACHINE_NAMES)
def test_a_session_does_what_the_forecast_says(machine: str, step: str, precision: str, tmp_path: Path) -> None:
    assert compare(0, machine, step, precision, tmp_path / "disk").fits


@pytest.mark.parametrize(
    "seed", [seed if seed < 2 else pytest.param(seed, marks=pytest.mark.campaign) for seed in range(1, 41)]
)
def test_a_session_does_what_the_forecast_of_a_random_model_says(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    compare(seed, draw.choice(MACHINE_NAMES), draw.choice(STEPS), draw.choice(("fp32", "bf16")), tmp_path / "disk")


def lets_nothing_go(_: Planner, draft: Draft) -> Draft:
    return replace(draft, frees=())


def test_a_pass_that_only_one_side_has_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *passes, last = planner.PASSES

    def add_to_the_session() -> None:
        monkeypatch.setattr(planner, "PASSES", (*passes, lets_nothing_go, last))

    with pytest.raises(AssertionError):
        compare(0, "emulated", "deferred", "fp32", tmp_path / "disk", between=add_to_the_session)
