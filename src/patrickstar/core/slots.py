"""Slots of an arena that are in use, and those that hold pages: bookkeeping that has never seen a byte.

(1) A slot is in use, warm (free, its pages are committed), cold (free, without pages), or apart (has none, and is not to be taken).
(2) `in_use` is the count of such slots; `committed` counts warm ones too, and is what the process really holds.
(3) The queue of warm slots holds each warm slot once, the one that was given back longest ago first.
(4) What was given back last is taken last, so that a freed slot's address changes hands as late as it can: a stale
    view then reads old bytes (poison, in tests), not the contents of the next tenant, and slots are seen to move.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Final

_COLD, _WARM, _USED, _APART = 0, 1, 2, 3
_WARM_EXTENT: Final = re.compile(rb"\x01+")


class SlotMap:
    """The slots `[0, virtual_slots)` of an arena: `take` and `give` them, one or several adjacent ones. `in_use`: taken and not given back."""

    def __init__(self, virtual_slots: int) -> None:
        if virtual_slots < 1:
            raise ValueError(f"an arena of {virtual_slots} slots: give at least 1")
        self.virtual_slots = virtual_slots

        self._state = bytearray(virtual_slots)
        self._warm: OrderedDict[int, None] = OrderedDict()
        self.in_use = 0
        self._last_given = (0, 0)

    @property
    def committed(self) -> int:
        """Slots that hold pages: those in use, and the warm ones."""
        return self.in_use + len(self._warm)

    def can_take(self, n: int = 1) -> bool:
        """Tells whether there are `n` adjacent free slots."""
        return bool(self._warm) or _COLD in self._state if n == 1 else self._best_run(n) >= 0

    def take(self, n: int = 1) -> int:
        """The first of `n` adjacent slots, now in use. Warm ones where there are such, else as many warm as can be.

        Raises:
            LookupError: there are no `n` adjacent free slots; the arena's virtual size was chosen too small.
        """
        first = next(iter(self._warm), self._state.find(_COLD)) if n == 1 else self._best_run(n)
        if first < 0:
            raise LookupError(
                f"no {n} adjacent free slots among {self.virtual_slots}, of which {self.in_use} are in use"
            )
        for slot in range(first, first + n):
            if self._state[slot] == _WARM:
                del self._warm[slot]
            self._state[slot] = _USED
        self.in_use += n
        return first

    def give(self, first: int, n: int = 1) -> None:
        """`n` slots from `first` on are free again, and stay warm."""
        assert first >= 0, f"slot {first} is no slot"
        assert n > 0, f"{n} slots are given back"
        span = slice(first, first + n)
        assert self._state[span] == bytes([_USED]) * n, f"slots {first} to {first + n - 1} are not all in use"
        self._state[span] = bytes([_WARM]) * n
        self._warm.update(dict.fromkeys(reversed(range(first, first + n))))  # its head is what (4) speaks of
        self.in_use -= n
        self._last_given = (first, n)

    def trim(self, max_committed: int) -> list[int]:
        """Slots, sorted, whose pages must go back to the system, so that at most `max_committed` slots hold pages.

        Those given back longest ago go first. Slots in use stay: the result may still be above the bound.
        """
        surplus = min(self.committed - max_committed, len(self._warm))
        cooled = sorted(self._warm.popitem(last=False)[0] for _ in range(surplus))
        for slot in cooled:
            self._state[slot] = _COLD
        return cooled

    def set_apart(self, slot: int) -> None:
        """A cold slot is not taken any more, until `put_back`."""
        assert self._state[slot] == _COLD, f"slot {slot} is set apart but not cold"
        self._state[slot] = _APART

    def put_back(self, slot: int) -> None:
        """A slot that was set apart is cold again."""
        assert self._state[slot] == _APART, f"slot {slot} is put back but was not set apart"
        self._state[slot] = _COLD

    def _best_run(self, n: int) -> int:
        """The first slot of the `n` free adjacent ones among which most are warm, the highest such, or -1.

        The highest, since single slots are taken from the low end: the two seldom cut into each other.
        """
        assert n > 0, f"{n} slots are asked for"
        warm_run = self._last_warm_run(n)
        if warm_run >= 0:
            return warm_run
        best, best_warm = -1, -1
        for extent in re.finditer(rb"[\x00\x01]{%d,}" % n, self._state):
            high = extent.end() - n
            # Of the windows with the most warm slots, one begins where a warm extent does, or is the last there is.
            warm_extents = _WARM_EXTENT.finditer(self._state, extent.start(), extent.end())
            starts = {min(warm.start(), high) for warm in warm_extents} | {high}
            for start in starts:
                n_warm = self._state.count(_WARM, start, start + n)
                if (n_warm, start) > (best_warm, best):
                    best, best_warm = start, n_warm
        return best

    def _last_warm_run(self, n: int) -> int:
        """The highest run of `n` warm slots, but what was given back last only where there is no other; or -1."""
        run = bytes([_WARM]) * n
        found = self._state.rfind(run)
        last, n_last = self._last_given
        if found < 0 or found >= last + n_last or last >= found + n:
            return found
        apart = self._state.rfind(run, 0, last)  # one above would have been found first
        if apart >= 0:
            return apart
        shifted = self._state.rfind(run, 0, found + n - 1) if found == last else -1
        return shifted if shifted >= 0 else found
