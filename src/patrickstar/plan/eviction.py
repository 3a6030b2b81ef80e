"""Orders in which units leave the compute tier. A policy orders candidates; it moves nothing.

A policy says how much a copy is worth keeping, as a number: the copy of least worth goes first. Ties go clean before
dirty, since a clean copy leaves without a transfer, and then by id, so that every rank decides alike.

- `next-use`: worth more the sooner it is used next (Belady). No policy fetches less where units are equal and clean.
- `lru`: worth more the later it was used last.

A step follows a step, so a trace has no end: what is used first in the next one is used next after the last moment.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Trace
from patrickstar.errors import ConfigError, nearest
from patrickstar.plan.residency import DIRTY, HERE, Residency

NEVER: Final = sys.maxsize

Worth = Callable[[PlaneRef, int], int]
"""How much a unit's copy is worth keeping once the moment of this number has begun."""


class Uses:
    """Times at which units are touched: in a trace, and in the one that follows it, over and over.

    Moments of the trace count from 0. Those before it are negative, those after its end go on from its length.
    """

    def __init__(self, trace: Trace, following: Trace | None = None) -> None:
        """Reads both traces. `following`: what comes after the trace, and then the trace again; None: the trace itself."""
        follower = trace if following is None else following
        self.n_moments = len(trace)
        self.n_following = len(follower)
        self._at: dict[PlaneRef, list[int]] = {}
        for index, moment in enumerate(trace.moments):
            for touch in moment.touches:
                self._at.setdefault(touch.ref, []).append(index)
        period = len(trace) + len(follower)
        self._after = {ref: period + at[0] for ref, at in self._at.items()}
        self._before = {ref: at[-1] - period for ref, at in self._at.items()}
        for index in reversed(range(len(follower))):
            self._after.update((touch.ref, len(trace) + index) for touch in follower.moments[index].touches)
        for index, moment in enumerate(follower.moments):
            self._before.update((touch.ref, index - len(follower)) for touch in moment.touches)

    def after(self, ref: PlaneRef, now: int) -> int:
        """The first moment after `now` that touches the unit, or `NEVER`."""
        at = self._at.get(ref)
        if at and at[-1] > now:
            return at[bisect_right(at, now)]
        return self._after.get(ref, NEVER)

    def until(self, ref: PlaneRef, now: int) -> int:
        """The last moment up to `now` that touches the unit, or `-NEVER`."""
        at = self._at.get(ref)
        if at and at[0] <= now:
            return at[bisect_right(at, now) - 1]
        return self._before.get(ref, -NEVER)


def worth_by_next_use(uses: Uses) -> Worth:
    """The `next-use` policy."""
    return lambda ref, now: -uses.after(ref, now)


def worth_by_last_use(uses: Uses) -> Worth:
    """The `lru` policy."""
    return uses.until


POLICIES: Final[Mapping[str, Callable[[Uses], Worth]]] = MappingProxyType(
    {"next-use": worth_by_next_use, "lru": worth_by_last_use}
)


def policy_named(name: str) -> Callable[[Uses], Worth]:
    """The policy of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in POLICIES:
        known = ", ".join(f'"{policy}"' for policy in POLICIES)
        raise ConfigError(f'eviction="{name}": expected one of {known}{nearest(name, POLICIES)}')
    return POLICIES[name]


def eviction_order(candidates: Iterable[PlaneRef], *, state: Residency, worth: Worth, now: int) -> list[PlaneRef]:
    """Candidates, best victim first: of least worth, then clean before dirty, then by id. What `Ranking` keeps up."""
    return sorted(candidates, key=lambda ref: (worth(ref, now), state.resident.get(ref) is DIRTY, ref))


class Ranking:
    """The eviction order of everything that may leave, kept sorted as units are used: an `Order` for `make_room`.

    Sorting thousands of candidates at each of thousands of moments would take seconds; one use costs one insertion.
    A unit's worth is asked for only when it is used, which is enough: until its next use it does not change.
    """

    def __init__(self, state: Residency, *, worth: Worth, now: int = -1) -> None:
        self._state = state
        self._worth = worth

        self._keys = {
            ref: (worth(ref, now), copy is DIRTY, ref) for ref, copy in state.resident.items() if copy is not HERE
        }
        self._sorted = sorted(self._keys.values())

    def __call__(self, candidates: Iterable[PlaneRef]) -> Iterator[PlaneRef]:  # noqa: ARG002 - it has its own
        return (ref for _, _, ref in self._sorted)

    def __contains__(self, ref: PlaneRef) -> bool:
        return ref in self._keys

    def used(self, ref: PlaneRef, now: int) -> None:
        """Notes that a unit is resident and used at moment `now`, whose writes are marked already."""
        copy = self._state.resident[ref]
        if copy is HERE:
            return
        old, new = self._keys.get(ref), (self._worth(ref, now), copy is DIRTY, ref)
        if old is not None:
            del self._sorted[bisect_left(self._sorted, old)]
        insort(self._sorted, new)
        self._keys[ref] = new

    def gone(self, ref: PlaneRef) -> None:
        """Notes that a unit is no longer resident."""
        key = self._keys.pop(ref, None)
        if key is not None:
            del self._sorted[bisect_left(self._sorted, key)]
