"""Lanes of every kind that a session may have: nothing may depend on which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Final

from patrickstar.memory.links import MakeLane, lanes_of
from patrickstar.memory.thread_lane import ThreadLane
from patrickstar.testing.manual_lane import ManualLane, RandomLane

__all__ = ["LANES"]


def _in_random_order(seed: int) -> MakeLane:
    random = Random(seed)
    return lambda src, dst: RandomLane(random)


def _threads(works: int) -> MakeLane:
    return lambda src, dst: ThreadLane(f"{src.value} to {dst}", works=works)


LANES: Final[Mapping[str, Callable[[int], MakeLane]]] = {
    "as it comes": lambda seed: lanes_of(),
    "late by chance": lambda seed: lanes_of(stress_seed=seed),
    "in a random order": _in_random_order,
    "as late as their wait": lambda seed: lambda src, dst: ManualLane(),
    "a work a lane": lambda seed: _threads(1),
    "two works a lane": lambda seed: _threads(2),
    "four works a lane": lambda seed: _threads(4),
}
"""By name, given a seed."""
