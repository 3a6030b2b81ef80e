"""Lanes under which each row of the matrix is run: no bit and no plan depends on them, so that they make no rows of their own."""

from __future__ import annotations

import zlib
from typing import Final

from patrickstar.memory.links import MakeLane
from tests.lanes import LANES
from tests.parity.matrix import PAIRS, WIDE, Row
from tests.parity.zoo import CASES

__all__ = ["lanes_for", "lanes_named"]


def _in_turn() -> dict[Row, str]:
    """The rows of each model have all lanes in turn, and models begin with different ones."""
    named, next_of = {}, {model: number for number, model in enumerate(CASES)}
    for row in (*PAIRS, *WIDE):
        named[row] = list(LANES)[next_of[row.model] % len(LANES)]
        next_of[row.model] -= 1  # backwards: so all pairs are had, which `test_matrix.py` counts
    return named


_NAMED: Final = _in_turn()


def lanes_named(row: Row) -> str:
    """The name of the lanes of a row."""
    return _NAMED.get(row, "as it comes")


def lanes_for(row: Row) -> MakeLane:
    """The lanes of a row."""
    return LANES[lanes_named(row)](zlib.crc32(str(row).encode()))
