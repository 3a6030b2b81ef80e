"""step/overflow.py on a device: flags are kept there, and read once."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

import patrickstar
from patrickstar.optim.passes import TorchPasses
from patrickstar.optim.reference import Reference
from patrickstar.step.overflow import Overflow, names_of, read
from tests.cuda.schedules import FEW_SCHEDULES
from tests.cuda.twins import CHUNK, TIGHT, batch, mlp

if TYPE_CHECKING:
    from tests.accelerator.cuda import Accelerator

PASSES = TorchPasses(Reference())


@pytest.mark.parametrize("schedule", FEW_SCHEDULES, ids=str)
def test_the_host_waits_once_for_all_gradients(schedule: tuple[float, int], accelerator: Accelerator) -> None:
    accelerator.configure(*schedule)
    pieces = {
        "fine": torch.ones(8, device="cuda"),
        "late": torch.ones(8, device="cuda"),
        "infinite": torch.tensor([1.0, -torch.inf], device="cuda"),
        "none": torch.tensor([torch.nan, 1.0], device="cuda"),
        "empty": torch.empty(0, device="cuda"),
    }
    overflow = Overflow()
    accelerator.waits()
    for name in ("infinite", "fine", "none", "empty", "late", "infinite"):
        overflow.note(name, PASSES.is_finite(pieces[name]))
    assert not accelerator.waits()
    seen_before = overflow.flags()
    numbers = torch.tensor([3.0, torch.inf], dtype=torch.float64, device="cuda")
    accelerator.waits()
    assert read(overflow.flags(), numbers) == [3.0, torch.inf]
    assert accelerator.waits()[threading.get_native_id()].total() == 1
    assert names_of(overflow.flags()) == names_of(seen_before) == ["infinite", "none"]
    assert not accelerator.waits()


def test_what_is_let_go_is_forgotten_read_or_not() -> None:
    overflow = Overflow()
    bad = torch.tensor([torch.nan], device="cuda")
    for name in ("one", "other", "third"):
        overflow.note(name, PASSES.is_finite(bad))
    overflow.forget("one")
    assert names_of(overflow.flags()) == ["other", "third"]
    overflow.forget("other")
    assert names_of(overflow.flags()) == ["third"]
    overflow.note("third", PASSES.is_finite(torch.ones(1, device="cuda")))
    assert names_of(overflow.flags()) == ["third"]


def test_gradients_that_a_hook_changes_before_the_step_count_as_changed_in_its_norm(accelerator: Accelerator) -> None:
    """The norm is taken before `step()`, to be read with the flags, but where a hook comes between them."""
    accelerator.configure(0.3, 1)
    weights = []
    for by_hook in (False, True):
        model = mlp()
        with patrickstar.manage(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3),
            device="cuda",
            device_memory=TIGHT,
            precision="fp16",
            max_grad_norm=1e-3,
            options=patrickstar.Options(chunk_size=CHUNK, poison=True),
        ) as session:
            halve = partial(halve_gradients, model)
            if by_hook:
                session.optimizer.register_step_pre_hook(halve)
            for number in range(3):
                session.scaler.scale(model(batch(number)).float().square().mean()).backward()
                if not by_hook:
                    session.scaler.unscale_(session.optimizer)
                    halve()
                session.scaler.step(session.optimizer)
                session.scaler.update()
                session.optimizer.zero_grad()
            weights.append({name: value.clone() for name, value in session.state_dict().items()})
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def halve_gradients(model: torch.nn.Module, *_: object) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
