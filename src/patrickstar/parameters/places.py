"""Which parameters lie in what is leased."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from patrickstar.core.plane import PlaneRef
from patrickstar.memory.leases import WeightKey
from patrickstar.parameters.bound import BoundParameter

__all__ = ["Places"]


class Places:
    """The parameters and tiles of a binding by unit, and by name where they are copied."""

    def __init__(self, by_name: Mapping[str, BoundParameter]) -> None:
        self._by_name = by_name
        self._starts: dict[PlaneRef, tuple[list[int], list[BoundParameter]]] = {}
        in_units = [bound for bound in by_name.values() if not bound.tiles]
        for bound in sorted(in_units, key=lambda bound: bound.offset):
            starts, owners = self._starts.setdefault(bound.ref, ([], []))
            starts.append(bound.offset)
            owners.append(bound)

    def parameters_in(self, key: WeightKey) -> Sequence[BoundParameter]:
        """The parameters that lie in a weight unit, by rising offset, or the one of a copy."""
        return self._starts[key][1] if isinstance(key, PlaneRef) else [self._by_name[key]]

    def owner(self, key: WeightKey, offset: int) -> BoundParameter:
        """The parameter that an element is of."""
        if not isinstance(key, PlaneRef):
            return self._by_name[key]
        starts, owners = self._starts[key]
        return owners[bisect.bisect_right(starts, offset) - 1]
