"""A device that has less memory than the budget says: a `BudgetError` in torch's place, and a session that goes on."""

from __future__ import annotations

import gc

import pytest
import torch

from patrickstar.errors import BudgetError
from tests.cuda.schedules import Accelerator
from tests.cuda.twins import TIGHT, Hungry, batch, hungry_mlp, mlp, twins

HUNGER = 64 << 20


@pytest.fixture
def accelerator(accelerator: Accelerator) -> Accelerator:
    """A device with 16 MiB more than what is in use, on which no peak of before hides a new one."""
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    in_use = accelerator.driver_bytes() + torch.accelerator.memory_stats()["reserved_bytes.all.current"]
    accelerator.configure(0.3, 1, capacity=in_use + (16 << 20))
    return accelerator


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_without_memory_names_the_moment_and_who_has_what(
    where: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with twins(hungry_mlp) as pair:
        pair.train(1)
        for name, value in {"nbytes": HUNGER, "when": where, "spared": 2}.items():
            monkeypatch.setattr(Hungry, name, value)
        with pytest.raises(
            BudgetError, match=r"no memory for 64\.00 MiB more after op \d+ .*, although device_memory"
        ) as raised:
            pair.model(batch(5)).square().mean().backward()
        error = raised.value
        assert error.tier == "device"
        assert error.needed_bytes - error.available_bytes >= HUNGER - (16 << 20)
        assert where in error.moment
        monkeypatch.setattr(Hungry, "nbytes", 0)
        pair.session.optimizer.zero_grad()
        pair.train(2, first=1)
        pair.expect_same()


def test_the_next_step_leaves_the_room_that_was_missing(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with twins(hungry_mlp, device_memory=32 << 20) as pair:
        pair.train(1)
        monkeypatch.setattr(Hungry, "nbytes", 17 << 20)
        with pytest.raises(BudgetError):
            pair.model(batch(5))
        monkeypatch.setattr(Hungry, "nbytes", 0)
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
        monkeypatch.setattr(Hungry, "nbytes", HUNGER)
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
