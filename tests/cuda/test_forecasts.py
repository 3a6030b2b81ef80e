"""Forecasts of forwards that say where they are: steps are planned from the first on, have the bits of plain PyTorch, and leave nothing changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import patrickstar
from patrickstar.session.forecast import forecast
from tests.cuda.schedules import Accelerator
from tests.cuda.twins import CHUNK, WIDTH, batch, mlp, twins


class Cast(nn.Module):
    """Computes in bf16 under autocast of its device, named by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            x = self.layers(x)
        return x.float()


class Positions(nn.Module):
    """Makes tensors on its device, and has a buffer there."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(len(x), device="cuda") + torch.zeros((), device=x.device, dtype=torch.long)
        mask = torch.ones(len(x), 1).cuda()
        if positions.max() >= len(x) or not self.scale.item():
            raise AssertionError("what follows from numbers is known")
        return self.layers(x * mask + positions.unsqueeze(1).float() * self.scale)


class Branches(nn.Module):
    """Goes another way on a device, as models with kernels of their own do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.others = mlp(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        is_here = x.is_cuda and x.device.type == "cuda" and next(self.parameters()).is_cuda
        return self.layers(x) if is_here else self.others(x)


class Recomputed(nn.Module):
    """Keeps states of generators, the device's too, for what is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "autocast": Cast,
    "positions": Positions,
    "branches": Branches,
    "checkpointing": Recomputed,
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


@pytest.mark.parametrize("step", ["deferred", "in_backward"])
@pytest.mark.parametrize("name", MODELS)
def test_a_forward_that_says_where_it_is_is_planned_from_the_first_step_on(
    name: str, step: str, accelerator: Accelerator
) -> None:
    with twins(lambda: built(name), step=step) as pair:
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
