"""The pytest plugin that gives every test of a process the device: `python -m tests.accelerator` loads it, before torch.

A test may leave no race behind: what the checker has reported and the test has not taken fails it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from collections.abc import Iterator

import pytest

from tests.accelerator import cuda


@pytest.fixture
def accelerator() -> cuda.Accelerator:
    return cuda.ACCELERATOR


@pytest.fixture(autouse=True)
def no_race_is_left() -> Iterator[None]:
    """Each test begins with nothing queued, and ends without a race that it has not asked for."""
    cuda.ACCELERATOR.configure()
    yield
    cuda.ACCELERATOR.finish()
    races = cuda.ACCELERATOR.races()
    assert not races, f"{len(races)} races, the first of them: {races[:3]}"


@pytest.fixture(autouse=True, scope="session")
def driver_of_the_device() -> None:
    """The library finds the driver's functions where the device has them."""
    from patrickstar.memory import driver  # which imports torch

    driver._driver = lambda: cuda.DRIVER


@pytest.fixture(autouse=True, scope="session")
def operations_on_pinned_memory_are_seen() -> Iterator[None]:
    with cuda.ACCELERATOR.watching_the_host():
        yield
