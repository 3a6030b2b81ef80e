"""Numbers of free slots, moment by moment, that change over ranges of moments.

Moments lie in blocks: what is added to a whole block is noted once, and a block with enough everywhere is passed over at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_BLOCK: Final = 48  # moments: near the root of the few thousand that traces have


class FreeSlots:
    """The free slots of each moment, counted from 0."""

    def __init__(self, free: Iterable[int]) -> None:
        self._free = list(free)
        self._added = [0] * (-(-len(self._free) // _BLOCK))
        # No moment of a block has less.
        self._least = [min(self._free[at : at + _BLOCK]) for at in range(0, len(self._free), _BLOCK)]

    def add(self, slots: int, first: int, end: int) -> None:
        """Adds so many slots to each moment from `first` to before `end`."""
        while first < end:
            block = first // _BLOCK
            start, stop = block * _BLOCK, min((block + 1) * _BLOCK, len(self._free))
            if first == start and end >= stop:
                self._added[block] += slots
                self._least[block] += slots
            else:
                for moment in range(first, min(end, stop)):
                    self._free[moment] += slots
                self._least[block] += min(slots, 0)
            first = stop

    def enough_from(self, slots: int, first: int, end: int) -> int:
        """The earliest moment, from `first` on, from which every moment before `end` has at least so many; `end` where the last has not."""
        while end > first:
            block = (end - 1) // _BLOCK
            start, added = block * _BLOCK, self._added[block]
            if self._least[block] < slots:
                for moment in range(end - 1, max(first, start) - 1, -1):
                    if self._free[moment] + added < slots:
                        return moment + 1
                self._least[block] = min(self._free[start : start + _BLOCK]) + added
            end = start
        return max(end, first)
