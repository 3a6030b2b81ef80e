"""Few of many cases that together have everything which any of them has."""

from __future__ import annotations

import heapq
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def cover(cases: Sequence[T], goals: Callable[[T], Iterable[Hashable]]) -> list[T]:
    """Few of the cases that together have every goal any of them has.

    Greedily the case with most new goals, the first of equals. What a case would add only shrinks as others are taken, so
    a stale gain is an upper bound, and most cases need no second look.
    """
    numbers: dict[Hashable, int] = {}
    masks = []
    for case in cases:
        mask = 0
        for goal in goals(case):
            mask |= 1 << numbers.setdefault(goal, len(numbers))
        masks.append(mask)
    covered, everything, chosen = 0, (1 << len(numbers)) - 1, []
    heap = [(-mask.bit_count(), index) for index, mask in enumerate(masks)]
    heapq.heapify(heap)
    while covered != everything:
        _, index = heapq.heappop(heap)
        gain = (masks[index] & ~covered).bit_count()
        if heap and (-gain, index) > heap[0]:
            heapq.heappush(heap, (-gain, index))
            continue
        chosen.append(index)
        covered |= masks[index]
    return [cases[index] for index in chosen]


def only(few: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which all but a few are campaigns."""
    return [pytest.param(case, marks=() if case in few else pytest.mark.campaign) for case in cases]


def mark_what_is_left_out(items: Sequence[pytest.Item]) -> None:
    """Of the tests marked `sampled`, a few cases stay; the others are campaigns.

    Every test stays, and every value of each parameter: in some test of its file where it is a text, which is the same thing in
    all of them; in some test of its folder where it is a fixture's; and else in each test that has it. Those that are campaigns
    anyway are none of the few.
    """
    of_folder: dict[Path, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") is not None and item.get_closest_marker("campaign") is None:
            of_folder[item.path.parent].append(item)
    for cases in of_folder.values():
        chosen = set(cover(sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode())), _values_of))
        for case in cases:
            if case not in chosen:
                case.add_marker(pytest.mark.campaign)


def _values_of(case: Any) -> Iterator[Hashable]:
    """What a case is there for. Other values than texts are told apart by identity: a list of cases has each of them once."""
    test = case.nodeid.partition("[")[0]
    yield test
    marks = [mark for mark in case.iter_markers("parametrize") if not mark.kwargs.get("indirect")]
    of_test = {name for mark in marks for name in _names(mark.args[0])}
    for name, value in case.callspec.params.items() if hasattr(case, "callspec") else ():
        what = value if isinstance(value, str) else id(value)
        yield name, what, "" if name not in of_test else case.path if isinstance(value, str) else test


def _names(said: str | Sequence[str]) -> Sequence[str]:
    return [name.strip() for name in said.split(",")] if isinstance(said, str) else said
