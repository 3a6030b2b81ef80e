"""Lanes under which each row of the matrix is run, how early transfers may begin, and when chunks are updated: no bit depends on that, so that
it makes no rows of its own.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from patrickstar.core.machine import Tier
from patrickstar.memory.links import MakeLane
from patrickstar.plan.update_choice import UpdateChoice
from tests.lanes import LANES
from tests.parity.matrix import PAIRS, WIDE, Row
from tests.parity.zoo import CASES

__all__ = ["CHOICES", "DEPTHS", "choice_named", "choice_of", "depth_of", "lanes_for", "lanes_named"]

DEPTHS: Final = (None, 0, 1, 3)
"""Moments by which transfers may be early: `Options.prefetch`."""


CHOICES: Final[Mapping[str, UpdateChoice]] = {
    "woven": UpdateChoice(),
    "apart": UpdateChoice(apart=True),
    "woven, on either": UpdateChoice(tier=lambda chunk: _EITHER[zlib.crc32(bytes([chunk % 251])) % 2]),
    "woven, where it computes": UpdateChoice(tier=lambda chunk: Tier.DEVICE),
}
"""When and where chunks are updated, by name. Without a device below which there is a host, where makes no difference."""

_EITHER = (Tier.DEVICE, Tier.HOST)


class _Turn(NamedTuple):
    lanes: str
    depth: int | None
    choice: str


def _in_turn() -> dict[Row, _Turn]:
    """The rows of each model have all lanes in turn, and models begin with different ones; those of each kind of lanes have all depths in turn.

    Those of each depth have all choices of updates in turn.
    """
    turns, next_of = {}, {model: number for number, model in enumerate(CASES)}
    met: Counter[str | int | None] = Counter()
    for row in (*PAIRS, *WIDE):
        lanes = list(LANES)[next_of[row.model] % len(LANES)]
        next_of[row.model] -= 1  # backwards: so all pairs are had, which `test_matrix.py` counts
        depth = DEPTHS[met[lanes] % len(DEPTHS)]
        turns[row] = _Turn(lanes, depth, list(CHOICES)[met[depth] % len(CHOICES)])
        met[lanes] += 1
        met[depth] += 1
    return turns


_TURNS = _in_turn()
_NONE = _Turn("as it comes", None, "woven")


def lanes_named(row: Row) -> str:
    """The name of the lanes of a row."""
    return _TURNS.get(row, _NONE).lanes


def lanes_for(row: Row) -> MakeLane:
    """The lanes of a row."""
    return LANES[lanes_named(row)](zlib.crc32(str(row).encode()))


def depth_of(row: Row) -> int | None:
    """The depth of a row."""
    return _TURNS.get(row, _NONE).depth


def choice_named(row: Row) -> str:
    """The name of when chunks are updated in a row."""
    return _TURNS.get(row, _NONE).choice


def choice_of(row: Row) -> UpdateChoice:
    """When chunks are updated in a row."""
    return CHOICES[choice_named(row)]
