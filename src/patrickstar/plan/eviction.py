"""Orders in which units leave a tier. A policy orders candidates; it moves nothing.

The copy of least worth goes first. Ties go clean before dirty, and then by id, so that every rank decides alike. From the host below a device goes
first what has a copy on the device and on the disk: as long as the device has it, that of the host saves nothing.

- `next-use`: worth more the sooner it is used next (Belady). No policy fetches less where units are equal and clean. A copy that is written
  elsewhere before it is used again, or goes there anyway, is worth next to nothing: of such, what was used longest ago goes first. Where steps
  are to repeat each other, what was there when the step began is worth more than all that was not.
- `lru`: worth more the later it was used last.

A step follows a step, so a trace has no end: what is used first in the next one is used next after the last moment.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Trace
from patrickstar.plan.residency import Residency

NEVER: Final = sys.maxsize

Worth = Callable[[PlaneRef, int], int]
"""How much a unit's copy is worth keeping once the moment of this number has begun."""


class Uses:
    """Times at which units are touched: in a trace, and in the one that follows it, over and over.

    Moments of the trace count from 0. Those before it are negative, those after its end go on from its length.

    Args:
        following: what comes after the trace, and then the trace again; None: the trace itself. goes_down: what is used on the tier below after it.
        stays: what was on the tier that computes at the beginning, where it is to be there at the end.
    """

    def __init__(
        self,
        trace: Trace,
        following: Trace | None = None,
        *,
        goes_down: Collection[PlaneRef] = frozenset(),
        stays: Collection[PlaneRef] = frozenset(),
    ) -> None:
        self._goes_down = goes_down
        self.stays = stays
        self._at, self._lost = _read(trace)
        used, lost = (self._at, self._lost) if following is None else _read(following)
        n_moments, n_following = len(trace), len(trace if following is None else following)
        # What is used first when the trace comes again, unless it is used before that in what follows.
        self._after: dict[PlaneRef, int] = {}
        for at, elsewhere, start in ((self._at, self._lost, n_moments + n_following), (used, lost, n_moments)):
            self._after.update((ref, start + own[0]) for ref, own in at.items())
            lost_first = [ref for ref, own in elsewhere.items() if start + own[0] < self._after.get(ref, NEVER)]
            self._after.update(dict.fromkeys(lost_first, NEVER))
        self._before = {ref: own[-1] - n_moments - n_following for ref, own in self._at.items()}
        self._before.update((ref, own[-1] - n_following) for ref, own in used.items())

    def after(self, ref: PlaneRef, now: int) -> int:
        """The first moment after `now` that touches the unit, or `NEVER`: also where it has been written elsewhere by then."""
        used = _next(self._at.get(ref), now)
        lost = _next(self._lost.get(ref), now) if self._lost else NEVER
        if used == lost == NEVER:
            return self._after.get(ref, NEVER)
        return used if used < lost else NEVER

    def by_next_use(self, ref: PlaneRef, now: int) -> int:
        """The worth of a unit by the `next-use` policy."""
        if ref in self._goes_down or ref in self._lost:
            used = _next(self._at.get(ref), now)
            if used == NEVER if ref in self._goes_down else used == self.after(ref, now) == NEVER:
                return now - NEVER  # its next use is on the tier below, where it is written, or it goes anyway
        return -self.after(ref, now) + (NEVER if ref in self.stays else 0)

    def until(self, ref: PlaneRef, now: int) -> int:
        """The last moment up to `now` that touches the unit, or `-NEVER`."""
        at = self._at.get(ref)
        if at and at[0] <= now:
            return at[bisect_right(at, now) - 1]
        return self._before.get(ref, -NEVER)


def _next(at: list[int] | None, now: int) -> int:
    return at[bisect_right(at, now)] if at and at[-1] > now else NEVER


def _read(trace: Trace) -> tuple[dict[PlaneRef, list[int]], dict[PlaneRef, list[int]]]:
    """The moments in which each unit is used on the tier that computes, and those in which it is written elsewhere, so that copies there are old."""
    used, lost = defaultdict[PlaneRef, list[int]](list), defaultdict[PlaneRef, list[int]](list)
    for index, moment in enumerate(trace.moments):
        for ref, writes, tier in moment.touches:
            if tier is None:
                used[ref].append(index)
            elif writes:
                lost[ref].append(index)
    return used, lost


POLICIES: Final[Mapping[str, Callable[[Uses], Worth]]] = MappingProxyType(
    {"next-use": lambda uses: uses.by_next_use, "lru": lambda uses: uses.until}
)


def eviction_order(refs: Iterable[PlaneRef], *, state: Residency, tier: Tier, worth: Worth, now: int) -> list[PlaneRef]:
    """Candidates for leaving a tier, best victim first: what saves nothing there, then of least worth, then clean before dirty, then by id."""
    return sorted(refs, key=lambda ref: _key(state, ref, tier, worth(ref, now)))


_Key = tuple[bool, int, bool, PlaneRef]


def _key(state: Residency, ref: PlaneRef, tier: Tier, worth: int) -> _Key:
    if tier is state.compute:
        return True, worth, state.is_dirty(ref, tier), ref
    is_dirty = not state.is_newest(ref, state.home[ref])
    return is_dirty or not state.is_newest(ref, state.compute), worth, is_dirty, ref


class Ranking:
    """The eviction order of everything that may leave, kept sorted as units are used: an `Order` for `make_room`.

    Sorting thousands of candidates at each of thousands of moments would take seconds; one use costs one insertion.
    A unit's worth is asked for only when it is used, which is enough: until its next use it does not change.
    """

    def __init__(self, state: Residency, *, worth: Worth) -> None:
        self._state = state
        self._worth_now = worth

        self._worth: dict[PlaneRef, int] = {}
        self._keys: dict[Tier, dict[PlaneRef, _Key]] = {tier: {} for tier in state.taken}
        self._sorted: dict[Tier, list[_Key]] = {tier: [] for tier in state.taken}
        self.used(-1, {ref for refs in state.taken.values() for ref in refs})

    def __call__(self, tier: Tier, candidates: Iterable[PlaneRef]) -> Iterator[PlaneRef]:  # noqa: ARG002 - it has its own
        return (ref for _, _, _, ref in self._sorted[tier])

    def used(self, now: int, refs: Collection[PlaneRef], moved: Iterable[PlaneRef] = ()) -> None:
        """Notes that units are used at moment `now`, whose writes are marked already.

        `moved`: units of which copies have come or gone, or are no longer what they were.
        """
        state, home, worths = self._state, self._state.home, self._worth
        for ref in refs:
            worths[ref] = self._worth_now(ref, now)
        changed = {*refs, *moved}
        for tier, taken in state.taken.items():
            keys, in_order, stale = self._keys[tier], self._sorted[tier], state.stale[tier]
            for ref in changed:
                new = None
                if ref in taken and home[ref] is not tier and ref not in stale:
                    new = _key(state, ref, tier, worths[ref] if ref in worths else self._worth_now(ref, -1))
                old = keys.get(ref)
                if old == new:
                    continue
                if old is not None:
                    del in_order[bisect_left(in_order, old)]
                    del keys[ref]
                if new is not None:
                    insort(in_order, new)
                    keys[ref] = new
