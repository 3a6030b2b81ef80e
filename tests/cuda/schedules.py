"""Schedules of the device: what is queued runs as late as it may, as early, and by chance between the two."""

from __future__ import annotations

from typing import Final

__all__ = ["FEW_SCHEDULES", "SCHEDULES"]

SCHEDULES: Final = ((0.0, 0), *((0.3, seed) for seed in range(5)), (1.0, 0))
FEW_SCHEDULES: Final = ((0.0, 0), (0.3, 1), (1.0, 0))
