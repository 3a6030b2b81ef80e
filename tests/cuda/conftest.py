"""These tests train on a device: without one they are not collected. `python -m tests.accelerator` and `python -m tests.gpu` run them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cuda.schedules import Accelerator

if not {"tests.gpu.plugin", "tests.accelerator.plugin"} & set(sys.modules):
    collect_ignore_glob = [str(Path(__file__).parent / "test_*.py")]


@pytest.fixture
def accelerator(request: pytest.FixtureRequest, accelerator: Accelerator) -> Accelerator:
    """The device, under the schedule of the test, or one by chance. That no race is left is looked at after each test."""
    accelerator.configure(*getattr(request, "param", (0.3, 1)))
    return accelerator
