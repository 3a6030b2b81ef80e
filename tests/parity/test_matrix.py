"""The matrix covers what it says it covers, counted a second way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from tests.parity.cover import every, few, few_meshes, few_ranks, meshes, pairs, ranks, wide
from tests.parity.lanes import DEALT, Dealt, choice_of, dealt, shows_choice
from tests.parity.limits import LIMITED, LIMITS
from tests.parity.matrix import DIMENSIONS, MESHES, OF_MESHES, OF_RANKS, PAIRS, RANKS, WIDE, Row, allowed, allowed_rows
from tests.parity.plans import DIGESTS, FORECASTS
from tests.parity.zoo import CASES
from tests.sampling import cover

FP32 = {"precision": "fp32", "tile_rows": None}


def combinations_of(rows: list[Row] | tuple[Row, ...], names: tuple[str, ...]) -> set[tuple[object, ...]]:
    return {tuple(getattr(row, name) for name in names) for row in rows}


def lacking(rows: Sequence[Row], everything: list[Row]) -> list[tuple[str, ...]]:
    """The pairs of dimensions of which the rows lack a pair of values that some allowed row has."""
    found = combinations(DIMENSIONS, 2)
    return [pair for pair in found if combinations_of(rows, pair) != combinations_of(everything, pair)]


@pytest.fixture(scope="module")
def everything() -> list[Row]:
    return list(allowed_rows())


@pytest.fixture(scope="module")
def in_fp32() -> list[Row]:
    return list(allowed_rows(**FP32))


def fp32_rows() -> list[Row]:
    return [row for row in (*PAIRS, *WIDE) if row == replace(row, **FP32)]


def test_every_pair_that_can_stand_in_a_row_stands_in_one(everything: list[Row]) -> None:
    assert lacking(PAIRS, everything) == []


def test_so_it_is_in_the_few_rows_that_are_dealt_first_but_for_pairs_with_a_model(everything: list[Row]) -> None:
    rows = few(PAIRS)
    assert {row.model for row in rows} == set(CASES)
    assert all("model" in names for names in lacking(rows, everything))


def test_a_missing_row_is_noticed(everything: list[Row]) -> None:
    assert lacking(tuple(row for row in PAIRS if not (row.model == "t5" and row.eviction == "lru")), everything)


@pytest.mark.parametrize(
    "names", [("model", "budget", "tier"), tuple(name for name in DIMENSIONS if name != "model")], ids="-".join
)
def test_every_model_runs_at_every_budget_on_every_machine_and_every_way_of_training_by_some_model(
    names: tuple[str, ...], in_fp32: list[Row]
) -> None:
    assert combinations_of(fp32_rows(), names) == combinations_of(in_fp32, names)
    # 3 budgets x 3 tiers, less the one that shows nothing
    assert len(combinations_of(in_fp32, ("model", "budget", "tier"))) == len(CASES) * 8


def test_every_model_and_checkpointing_runs_in_every_type() -> None:
    names = ("model", "checkpointing", "precision")
    possible = combinations_of(list(allowed_rows(tile_rows=None)), names)
    missing = possible - combinations_of((*PAIRS, *WIDE), names)
    assert {precision for _, checkpointing, precision in missing if checkpointing == "none"} == set()
    assert {precision for *_, precision in missing} <= {"fp16-fp32"}


def test_no_row_breaks_a_rule_or_stands_twice() -> None:
    rows = (*PAIRS, *WIDE, *RANKS, *MESHES)
    assert [row for row in rows if not allowed(row)] == []
    assert len(set(rows)) == len({str(row) for row in rows}) == len(rows)


def test_what_cannot_be_is_not_allowed() -> None:
    row = Row("gpt2", "none", 1, False, "in_backward", "lru", "minimum", "emulated")
    assert allowed(row)
    assert not allowed(replace(row, clipping=True))
    assert not allowed(replace(row, accumulation=4))
    assert not allowed(replace(row, precision="fp16-fp32"))
    assert not allowed(replace(row, model="lstm", checkpointing="reentrant"))
    assert not allowed(replace(row, tier="emulated+disk", budget="fits"))
    assert not allowed(replace(row, model="conv", tile_rows=24))
    assert not allowed(replace(row, world=2))
    assert allowed(replace(row, step="deferred", world=2))
    assert not allowed(replace(row, step="deferred", world=2, tile_rows=24))
    assert not allowed(replace(row, step="deferred", world=2, no_sync=True))
    shared = replace(row, step="deferred", world=4, mesh="2x2", method="rsa")
    assert allowed(shared)
    assert not allowed(replace(shared, mesh="1x2"))
    assert not allowed(replace(shared, method="2d"))
    assert not allowed(replace(shared, mesh="1x2x2"))


def test_a_row_prints_and_parses_back() -> None:
    rows = [*PAIRS, *WIDE, *RANKS, *MESHES]
    assert [Row.parse(str(row)) for row in rows] == rows
    with pytest.raises(ValueError, match="is no row"):
        Row.parse("gpt2-none-x1-noclip-deferred")


def test_every_row_has_its_budget_and_its_plans() -> None:
    rows = {str(row): row for row in (*PAIRS, *WIDE)}
    assert set(LIMITS) == set(rows)
    assert set(DIGESTS) == {*rows, *FORECASTS}
    for name, row in rows.items():
        assert set(LIMITS[name]) == (set() if row.budget == "fits" else set(LIMITED[row.tier]))


def shown(row: Row) -> list[tuple[str, object]]:
    """What is dealt to a row, but for a choice of updates that makes no difference there."""
    values = dealt(row)._asdict()
    if not shows_choice(row, values["choice"]):
        del values["choice"]
    return list(values.items())


def test_every_pair_of_values_that_are_dealt_stands_in_the_few_rows_that_are_dealt_first() -> None:
    possible = {pair for one in DEALT for pair in combinations(one._asdict().items(), 2)}
    assert possible - {pair for row in few(PAIRS) for pair in combinations(shown(row), 2)} == set()


def test_every_value_that_is_dealt_meets_every_value_of_a_rows_own_in_all_rows(everything: list[Row]) -> None:
    rows = (*PAIRS, *WIDE)
    for field in Dealt._fields:
        met = {(dict(shown(row)).get(field, "none"), name, getattr(row, name)) for row in rows for name in DIMENSIONS}
        values = {getattr(one, field) for one in DEALT}
        possible = {
            (value, name, getattr(row, name))
            for row in everything
            for value in values
            if field != "choice" or shows_choice(row, value)
            for name in DIMENSIONS
        }
        assert possible - met == set(), field


def test_chunks_are_updated_on_either_tier_by_each_rows_own_chance() -> None:
    rows = [row for row in (*PAIRS, *WIDE) if dealt(row).choice == "woven, on either"]
    splits = set()
    for row in rows:
        tier = choice_of(row).tier
        assert tier is not None
        splits.add(tuple(map(tier, range(20))))
    assert len(splits) > len(rows) // 2


def test_every_model_runs_on_every_number_of_ranks_and_every_pair_of_other_values_by_some() -> None:
    models = set(CASES) - {"branches"}
    assert combinations_of(RANKS, ("model", "world")) == {(model, world) for model in models for world in (2, 3, 4)}
    dimensions = {**DIMENSIONS, **OF_RANKS}
    possible = list(allowed_rows(dimensions, model="gpt2", step="deferred", tile_rows=None))
    for names in combinations(dimensions.keys() - {"model"}, 2):
        assert combinations_of(RANKS, names) == combinations_of(possible, names), names


def test_the_few_rows_of_ranks_have_every_value_of_most_dimensions() -> None:
    rows = few_ranks(RANKS)
    for name in ("world", "precision", "budget", "tier", "clipping", "no_sync"):
        assert combinations_of(rows, (name,)) == combinations_of(RANKS, (name,))


def test_every_method_runs_on_every_mesh_with_every_model_and_every_pair_of_values_by_some() -> None:
    dimensions = {**DIMENSIONS, **OF_RANKS, **OF_MESHES}
    possible = list(allowed_rows(dimensions, step="deferred", tile_rows=None, no_sync=False, eviction="lru"))
    for names in (("model", "mesh", "method"), *combinations(dimensions.keys() - {"eviction"}, 2)):
        assert combinations_of(MESHES, names) == combinations_of(possible, names), names
    for name in ("model", "mesh", "method", "checkpointing", "precision", "budget", "tier"):
        assert combinations_of(few_meshes(MESHES), (name,)) == combinations_of(MESHES, (name,))


@pytest.mark.campaign
def test_the_rows_that_are_checked_in_are_those_that_cover() -> None:
    assert pairs() == list(PAIRS)
    assert wide() == list(WIDE)
    assert ranks() == list(RANKS)
    assert meshes() == list(MESHES)


def test_a_cover_has_every_goal_and_no_row_without_a_new_one() -> None:
    rows = [replace(PAIRS[0], accumulation=n) for n in range(6)]
    goals = {0: "ab", 1: "abc", 2: "d", 3: "cd", 4: "", 5: "e"}

    def letters(row: Row):  # type: ignore[no-untyped-def]
        return ((("letter", letter),) for letter in goals[row.accumulation])

    assert [row.accumulation for row in cover(rows, letters)] == [1, 2, 5]


def test_the_same_rows_come_out_each_time() -> None:
    some = [row for row in allowed_rows(**FP32) if row.model in {"gpt2", "conv"}]
    goals = every(*combinations(DIMENSIONS, 2))
    assert cover(some, goals) == cover(list(some), goals)
    assert {row.model for row in cover(some, goals)} == {"gpt2", "conv"}
