"""Few of many cases that together have everything which any of them has."""

from __future__ import annotations

import heapq
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
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


def mark_what_is_left_out(items: Sequence[pytest.Item]) -> None:
    """Of each test marked `sampled`, a few cases in which every value of each of its parameters occurs stay; the others are campaigns.

    Those that are campaigns anyway are none of the few.
    """
    of_test: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") is not None and item.get_closest_marker("campaign") is None:
            of_test[item.nodeid.partition("[")[0]].append(item)
    for cases in of_test.values():
        in_no_order = sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))
        # Values are told apart by identity: a list of cases has each of them once.
        chosen = set(
            cover(in_no_order, lambda case: [(name, id(value)) for name, value in case.callspec.params.items()])
        )
        for case in cases:
            if case not in chosen:
                case.add_marker(pytest.mark.campaign)
