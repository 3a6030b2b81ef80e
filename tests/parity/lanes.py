"""What is dealt to the rows of the matrix: lanes, how early transfers may begin, and when and where chunks are updated. No bit depends on that, so
that it makes no rows of its own.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from itertools import combinations, product
from random import Random
from typing import Final, NamedTuple

from patrickstar.core.machine import Tier
from patrickstar.memory.works_under_way import MakeLane
from patrickstar.plan.update_choice import UpdateChoice
from tests.lanes import COMBINED
from tests.parity.cover import few
from tests.parity.matrix import DIMENSIONS, PAIRS, WIDE, Row

DEPTHS: Final = (None, 0, 1, 3)
"""Moments by which transfers may be early: `Options.prefetch`."""


def _on_either(row: Row) -> UpdateChoice:
    return UpdateChoice(tier=lambda chunk: Random(f"{row} {chunk}").choice(_EITHER))


CHOICES: Final[Mapping[str, Callable[[Row], UpdateChoice]]] = {
    "woven": lambda row: UpdateChoice(),
    "apart": lambda row: UpdateChoice(apart=True),
    "woven, on either": _on_either,
    "woven, where it computes": lambda row: UpdateChoice(tier=lambda chunk: Tier.DEVICE),
    "woven, on the host": lambda row: UpdateChoice(tier=lambda chunk: Tier.HOST),
}
"""When and where chunks are updated, by name: on either as each row's own chance has it, on the host wherever that can be."""

_EITHER = (Tier.DEVICE, Tier.HOST)


class Dealt(NamedTuple):
    """What is dealt to a row."""

    completion: str
    """When works on lanes are done."""
    works: int | None
    """How many of a lane at once; None: as the library's own lanes."""
    depth: int | None
    choice: str


DEALT: Final = tuple(Dealt(*lanes, depth, name) for lanes, depth, name in product(COMBINED, DEPTHS, CHOICES))
"""All that can be dealt."""

_NONE: Final = Dealt("as issued", None, None, "woven")


def shows_choice(row: Row, choice: str) -> bool:
    """Whether a run of the row differs by this choice: updates in a backward have none, and without a device there is one place for them."""
    return row.step == "deferred" and (row.tier != "cpu+disk" or choice in {"woven", "apart"})


@cache
def _dealt() -> Mapping[Row, Dealt]:
    """To each row what brings most that no row before it has had: two values that are dealt first, then one and a value of the row's own.

    The rows that are run each time come first.
    """
    first = few(PAIRS)
    pairs, met = set[object](), set[object]()
    times: Counter[Dealt] = Counter()
    found: dict[Row, Dealt] = {}
    for row in dict.fromkeys((*first, *PAIRS, *WIDE)):
        own = tuple((name, getattr(row, name)) for name in DIMENSIONS)
        new = {
            (name, value): sum((name, value, one) not in met for one in own)
            for name, values in zip(Dealt._fields, map(set, zip(*DEALT, strict=True)), strict=True)
            for value in values
        }

        def gain(one: Dealt, row: Row = row, new: Mapping[tuple[str, object], int] = new) -> tuple[int, ...]:
            at = _shown(row, one)
            fresh = sum(pair not in pairs for pair in combinations(at, 2))
            return fresh, sum(new[value] for value in at), -times[one]

        chosen = max((one for one in DEALT if row.step != "deferred" or shows_choice(row, one.choice)), key=gain)
        at = _shown(row, chosen)
        pairs |= set(combinations(at, 2))
        met |= {(*value, one) for value in at for one in own}
        times[chosen] += 1
        found[row] = chosen
    return found


def _shown(row: Row, one: Dealt) -> list[tuple[str, object]]:
    values = list(zip(Dealt._fields, one, strict=True))
    return values if shows_choice(row, one.choice) else values[:-1]


def dealt(row: Row) -> Dealt:
    """What is dealt to a row: to one of several ranks by chance, to one that is in no list what is usual."""
    if row.world > 1:
        choices = [one for one in DEALT if shows_choice(row, one.choice)]
        return Random(str(row)).choice(choices)
    return _dealt().get(row, _NONE)


def lanes_for(row: Row) -> MakeLane:
    """The lanes of a row."""
    one = dealt(row)
    return COMBINED[one.completion, one.works](zlib.crc32(str(row).encode()))


def depth_of(row: Row) -> int | None:
    """The depth of a row."""
    return dealt(row).depth


def choice_of(row: Row) -> UpdateChoice:
    """When and where chunks are updated in a row."""
    return CHOICES[dealt(row).choice](row)
