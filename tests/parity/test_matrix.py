"""The matrix covers what it says it covers, counted a second way."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from tests.parity.matrix import BF16_ROWS, DIMENSIONS, FP16_ROWS, ROWS, WIDENED_ROWS, Row, allowed, allowed_rows, cover
from tests.parity.zoo import CASES


@pytest.fixture(scope="module")
def everything() -> list[Row]:
    return list(allowed_rows())


def combinations_of(rows: list[Row] | tuple[Row, ...], names: tuple[str, ...]) -> set[tuple[object, ...]]:
    return {tuple(getattr(row, name) for name in names) for row in rows}


@pytest.mark.parametrize("pair", list(combinations(DIMENSIONS, 2)), ids="+".join)
def test_every_pair_that_can_stand_in_a_row_stands_in_one(pair: tuple[str, str], everything: list[Row]) -> None:
    assert combinations_of(ROWS, pair) == combinations_of(everything, pair)


def test_every_model_runs_at_every_budget_on_every_kind_of_machine(everything: list[Row]) -> None:
    names = ("model", "budget", "tier")
    assert combinations_of(ROWS, names) == combinations_of(everything, names)
    assert len(combinations_of(ROWS, names)) == len(CASES) * 8  # 3 budgets x 3 tiers, less the one that shows nothing


def test_every_way_of_training_is_run_by_some_model(everything: list[Row]) -> None:
    names = tuple(name for name in DIMENSIONS if name != "model")
    assert combinations_of(ROWS, names) == combinations_of(everything, names)


def test_a_missing_row_is_noticed(everything: list[Row]) -> None:
    lacking = [row for row in ROWS if not (row.model == "t5" and row.eviction == "lru")]
    pairs = combinations(DIMENSIONS, 2)
    assert any(combinations_of(lacking, pair) != combinations_of(everything, pair) for pair in pairs)


def test_no_row_breaks_a_rule_or_stands_twice() -> None:
    assert [row for row in ROWS if not allowed(row)] == []
    assert len(set(ROWS)) == len({str(row) for row in ROWS}) == len(ROWS)
    assert all(row.model in CASES for row in (*BF16_ROWS, *FP16_ROWS, *WIDENED_ROWS))
    assert [row for row in (*BF16_ROWS, *FP16_ROWS, *WIDENED_ROWS) if not allowed(row)] == []


def test_what_cannot_be_is_not_allowed() -> None:
    row = Row("gpt2", "none", 1, False, "in_backward", "lru", "minimum", "emulated")
    assert allowed(row)
    assert not allowed(replace(row, clipping=True))
    assert not allowed(replace(row, accumulation=4))
    assert not allowed(replace(row, model="lstm", checkpointing="reentrant"))
    assert not allowed(replace(row, tier="emulated+disk", budget="fits"))


def test_the_matrix_is_well_over_150_rows_and_far_below_all_of_them(everything: list[Row]) -> None:
    assert 200 <= len(ROWS) <= 300 < len(everything)


def test_the_same_rows_come_out_each_time(everything: list[Row]) -> None:
    models = {"gpt2", "conv"}
    some = [row for row in everything if row.model in models]
    assert cover(some) == cover(list(some))
    assert {row.model for row in cover(some)} == models


def test_a_cover_has_every_goal_and_no_row_without_a_new_one() -> None:
    rows = [replace(ROWS[0], accumulation=n) for n in range(6)]
    goals = {0: "ab", 1: "abc", 2: "d", 3: "cd", 4: "", 5: "e"}

    def letters(row: Row):  # type: ignore[no-untyped-def]
        return ((("letter", letter),) for letter in goals[row.accumulation])

    assert [row.accumulation for row in cover(rows, letters)] == [1, 2, 5]
