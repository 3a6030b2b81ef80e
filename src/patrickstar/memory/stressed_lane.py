"""A lane on which every work is late by chance, so that whoever does not wait for it finds something else."""

from __future__ import annotations

import time
from collections.abc import Collection
from random import Random

from patrickstar.memory.lanes import Lane, Task, Ticket

__all__ = ["StressedLane"]

_LATEST_SECONDS = 2e-3


class StressedLane:
    """Has another lane do its works, each a random time later than that would. `random`: where the times come from."""

    def __init__(self, lane: Lane, random: Random) -> None:
        self._lane = lane
        self._random = random

    def issue(self, work: Task, after: Collection[Ticket] = (), *, nbytes: int = 0) -> Ticket:
        # Most are late by a little, some by much.
        seconds = _LATEST_SECONDS * self._random.random() ** 3

        def late() -> None:
            time.sleep(seconds)
            work()

        return self._lane.issue(late, after, nbytes=nbytes)

    def drain(self) -> None:
        self._lane.drain()

    def close(self) -> None:
        self._lane.close()
