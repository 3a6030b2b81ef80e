"""step/overflow.py on a device: flags are kept there, and read once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from patrickstar.optim.passes import TorchPasses
from patrickstar.optim.reference import Reference
from patrickstar.step.overflow import Overflow
from tests.cuda.schedules import FEW_SCHEDULES

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
    assert overflow.names() == ["infinite", "none"]
    assert accelerator.waits()[threading.get_native_id()].total() == 1
    assert overflow.names() == ["infinite", "none"]
    assert not accelerator.waits()


def test_what_is_let_go_is_forgotten_read_or_not() -> None:
    overflow = Overflow()
    bad = torch.tensor([torch.nan], device="cuda")
    for name in ("one", "other", "third"):
        overflow.note(name, PASSES.is_finite(bad))
    overflow.forget("one")
    assert overflow.names() == ["other", "third"]
    overflow.forget("other")
    assert overflow.names() == ["third"]
    overflow.note("third", PASSES.is_finite(torch.ones(1, device="cuda")))
    assert overflow.names() == ["third"]
