"""Lanes of every kind that a session may have: nothing may depend on which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Final

from patrickstar.memory.lanes import StressedLane, ThreadLane
from patrickstar.memory.works_under_way import MakeLane, lanes_of
from tests.manual_lane import ManualLane, RandomLane


def _in_random_order(seed: int, works: int = 1) -> MakeLane:
    random = Random(seed)
    return lambda src, dst: RandomLane(random, works=works)


def _late(seed: int, works: int) -> MakeLane:
    random, threads = Random(seed), _threads(works)
    return lambda src, dst: StressedLane(threads(src, dst), Random(random.random()))


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


COMBINED: Final[Mapping[tuple[str, int | None], Callable[[int], MakeLane]]] = {
    ("as issued", None): LANES["as it comes"],
    ("late by chance", None): LANES["late by chance"],
    ("as late as their wait", None): LANES["as late as their wait"],
    **{("as issued", works): lambda seed, works=works: _threads(works) for works in (1, 2, 4)},  # type: ignore[misc]
    **{("late by chance", works): lambda seed, works=works: _late(seed, works) for works in (1, 2, 4)},  # type: ignore[misc]
    **{
        ("in a random order", works): lambda seed, works=works: _in_random_order(seed, works)  # type: ignore[misc]
        for works in (1, 2, 4)
    },
}
"""By when works are done and how many of a lane at once, given a seed. None: as many as the library's own lanes do."""
