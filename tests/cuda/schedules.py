"""Schedules of the device: what is queued runs as late as it may, as early, and by chance between the two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from tests.accelerator.cuda import Accelerator
else:
    Accelerator = object  # on a GPU it is another: it is imported before torch, or not at all

SCHEDULES: Final = ((0.0, 0), *((0.3, seed) for seed in range(5)), (1.0, 0))
FEW_SCHEDULES: Final = ((0.0, 0), (0.3, 1), (1.0, 0))


def under(schedules: Sequence[tuple[float, int]]) -> Any:
    """A fixture: the device under each of these. `accelerator = under(SCHEDULES)` is for a whole module."""

    @pytest.fixture(params=schedules, ids=str)
    def accelerator(accelerator: Accelerator) -> Accelerator:
        return accelerator  # `conftest.py` has begun the schedule

    return accelerator
