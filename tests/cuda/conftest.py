"""These tests train on the device: without it they are not collected. `python -m tests.accelerator` runs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if "tests.accelerator.cuda" in sys.modules:
    from patrickstar.memory import driver
    from tests.accelerator.cuda import DRIVER

    @pytest.fixture(autouse=True, scope="session")
    def driver_of_the_device() -> None:
        """The library finds the driver's functions where the device has them."""
        driver._driver = lambda: DRIVER
else:
    collect_ignore_glob = [str(Path(__file__).parent / "test_*.py")]
