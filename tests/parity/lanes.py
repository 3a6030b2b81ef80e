"""Lanes under which each row of the matrix is run, and how early transfers may begin: no bit depends on that, so that it makes no rows of its own."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Final

from patrickstar.memory.links import MakeLane
from tests.lanes import LANES
from tests.parity.matrix import PAIRS, WIDE, Row
from tests.parity.zoo import CASES

__all__ = ["DEPTHS", "depth_of", "lanes_for", "lanes_named"]

DEPTHS: Final = (None, 0, 1, 3)
"""Moments by which transfers may be early: `Options.prefetch`."""


def _in_turn() -> tuple[dict[Row, str], dict[Row, int | None]]:
    """The rows of each model have all lanes in turn, and models begin with different ones; those of each kind of lanes have all depths in turn."""
    named, depths, next_of = {}, {}, {model: number for number, model in enumerate(CASES)}
    met: Counter[str] = Counter()
    for row in (*PAIRS, *WIDE):
        named[row] = list(LANES)[next_of[row.model] % len(LANES)]
        next_of[row.model] -= 1  # backwards: so all pairs are had, which `test_matrix.py` counts
        depths[row] = DEPTHS[met[named[row]] % len(DEPTHS)]
        met[named[row]] += 1
    return named, depths


_NAMED, _DEPTHS = _in_turn()


def lanes_named(row: Row) -> str:
    """The name of the lanes of a row."""
    return _NAMED.get(row, "as it comes")


def lanes_for(row: Row) -> MakeLane:
    """The lanes of a row."""
    return LANES[lanes_named(row)](zlib.crc32(str(row).encode()))


def depth_of(row: Row) -> int | None:
    """The depth of a row."""
    return _DEPTHS.get(row)
