"""Forecasts of forwards that say where they are: steps are planned from the first on, have the bits of plain PyTorch, and leave nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import patrickstar
from patrickstar.session.forecast import forecast
from tests.composed import Composed
from tests.cuda.schedules import Accelerator
from tests.cuda.twins import CHUNK, WIDTH, batch, mlp, twins


def cast(model: Any, x: Tensor) -> Tensor:
    """Computes in bf16 under autocast of its device, named by hand."""
    with torch.autocast("cuda", torch.bfloat16):
        x = model.layers(x)
    return x.float()


def with_positions(model: Any, x: Tensor) -> Tensor:
    """Makes tensors on its device, and has a buffer there."""
    positions = torch.arange(len(x), device="cuda") + torch.zeros((), device=x.device, dtype=torch.long)
    mask = torch.ones(len(x), 1).cuda()
    if positions.max() >= len(x) or not model.scale.item():
        raise AssertionError("what follows from numbers is known")
    return model.layers(x * mask + positions.unsqueeze(1).float() * model.scale)


def branching(model: Any, x: Tensor) -> Tensor:
    """Goes another way on a device, as models with kernels of their own do."""
    is_here = x.is_cuda and x.device.type == "cuda" and next(model.parameters()).is_cuda
    return model.layers(x) if is_here else model.others(x)


def recomputed(model: Any, x: Tensor) -> Tensor:
    """Keeps states of generators, the device's too, for what is computed again."""
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "autocast": lambda: Composed(cast, layers=mlp()),
    "positions": lambda: Composed(with_positions, layers=mlp(), scale=nn.Buffer(torch.ones(1), persistent=False)),
    "branches": lambda: Composed(branching, layers=mlp(), others=mlp()),
    "checkpointing": lambda: Composed(recomputed, layers=mlp()),
}


@pytest.mark.parametrize("step", ["deferred", "in_backward"])
@pytest.mark.parametrize("name", MODELS)
def test_a_forward_that_says_where_it_is_is_planned_from_the_first_step_on(
    name: str, step: str, accelerator: Accelerator
) -> None:
    with twins(MODELS[name], step=step) as pair:
        pair.train(3)
        stats = pair.session.stats()
        assert (stats.planned_steps, stats.reason) == (3, "")
        pair.expect_same()


def test_a_forecast_changes_no_random_state_of_the_device(accelerator: Accelerator) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    torch.cuda.manual_seed(7)
    before = torch.cuda.get_rng_state()
    found = forecast(model, {"input": batch()}, device="cuda", options=patrickstar.Options(chunk_size=CHUNK))
    assert found.fits
    assert torch.equal(before, torch.cuda.get_rng_state())
