"""A device that has less memory than the budget says: a `BudgetError` in torch's place, and a session that goes on."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from patrickstar.errors import BudgetError
from tests.cuda.twins import TIGHT, WIDTH, batch, mlp, twins

if TYPE_CHECKING:
    from tests.accelerator.cuda import Accelerator

HUNGER = 64 << 20


@pytest.fixture
def accelerator(accelerator: Accelerator) -> Accelerator:
    """A device with 16 MiB more than what is in use."""
    gc.collect()
    torch.accelerator.empty_cache()
    in_use = accelerator.driver_bytes() + torch.accelerator.memory_stats()["reserved_bytes.all.current"]
    accelerator.configure(0.3, 1, capacity=in_use + (16 << 20))
    return accelerator


class Hungry(torch.autograd.Function):
    """Wants more memory than there is, forward or backward, where `wants` says so."""

    wants = ""
    spared = 0  # calls before it is hungry

    @staticmethod
    def take(device: torch.device) -> None:
        if Hungry.spared:
            Hungry.spared -= 1
        else:
            torch.empty(HUNGER, dtype=torch.uint8, device=device)

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        if Hungry.wants == "forward" and x.is_cuda:
            Hungry.take(x.device)
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        if Hungry.wants == "backward":
            Hungry.take(gradient.device)
        return gradient.clone()


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Hungry.apply(super().forward(x))


def hungry_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(WIDTH, WIDTH) for _ in range(5)])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_without_memory_names_the_moment_and_who_has_what(
    where: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with twins(hungry_mlp) as pair:
        pair.train(1)
        monkeypatch.setattr(Hungry, "wants", where)
        monkeypatch.setattr(Hungry, "spared", 2)
        with pytest.raises(
            BudgetError, match=r"no memory for 64\.00 MiB more after op \d+ .*, although device_memory"
        ) as raised:
            pair.model(batch(5)).square().mean().backward()
        error = raised.value
        assert error.tier == "device"
        assert error.needed_bytes - error.available_bytes >= HUNGER - (16 << 20)
        assert where in error.moment
        monkeypatch.setattr(Hungry, "wants", "")
        pair.session.optimizer.zero_grad()
        pair.train(2, first=1)
        pair.expect_same()


def test_the_next_step_leaves_the_room_that_was_missing(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cuda.test_out_of_memory.HUNGER", 17 << 20)
    with twins(hungry_mlp, device_memory=32 << 20) as pair:
        pair.train(1)
        monkeypatch.setattr(Hungry, "wants", "forward")
        with pytest.raises(BudgetError):
            pair.model(batch(5))
        monkeypatch.setattr(Hungry, "wants", "")
        pair.train(1, first=1)
        assert min(moment.nonmodel_bytes for moment in pair.session.trace.moments) > 18 << 20
        pair.expect_same()


def test_memory_that_is_missing_outside_of_a_step_is_torchs_own_error(accelerator: Accelerator) -> None:
    with twins() as pair:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(HUNGER, dtype=torch.uint8, device="cuda")
        pair.train(1)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(HUNGER, dtype=torch.uint8, device="cuda")
        pair.expect_same()


def test_of_two_sessions_the_one_whose_step_it_is_raises(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with twins(mlp) as idle, twins(hungry_mlp) as hungry:
        idle.train(1)
        monkeypatch.setattr(Hungry, "wants", "forward")
        with pytest.raises(BudgetError):
            hungry.model(batch(0))
        idle.train(1, first=1)
        idle.expect_same()


def test_nobody_is_told_of_a_session_that_is_gone(accelerator: Accelerator) -> None:
    with twins(device_memory=TIGHT) as pair:
        pair.train(1)
    del pair
    gc.collect()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(HUNGER, dtype=torch.uint8, device="cuda")
