"""No budget, tier, policy or way of stepping changes a bit: the library against plain PyTorch, row by row.

Each row trains five steps in both, with slots poisoned as they are given back, and compares bit patterns: every loss,
every gradient, norms, evaluations between steps, then weights, both moments, update counts and buffers.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from tests.parity import managed, oracle
from tests.parity.compare import differences, same_bits
from tests.parity.matrix import BF16_ROWS, FP16_ROWS, ROWS, TABLE_ROWS, TILED_ROWS, WIDENED_ROWS, Row
from tests.parity.oracle import Record
from tests.parity.zoo import CASES, STEPS

pytestmark = pytest.mark.slow

# Links over which a run must have moved bytes, or it has shown nothing about moving them.
LINKS = {
    "emulated": ("H>D", "D>H"),
    "cpu+disk": ("K>H", "H>K"),
    "emulated+disk": ("H>D", "D>H", "K>H", "H>K"),
}


@lru_cache(maxsize=4)  # rows are sorted so that those with one oracle follow each other
def want(
    model: str, checkpointing: str, accumulation: int, clipping: bool, precision: str, tile_rows: int | None
) -> Record:
    return oracle.train(
        CASES[model],
        checkpointing=checkpointing,
        accumulation=accumulation,
        clipping=clipping,
        precision=precision,
        tile_rows=tile_rows,
    )


def assert_parity(row: Row, directory: Path) -> None:
    """Runs the row and fails with the first differences, in the order in which training meets them."""
    expected = want(row.model, row.checkpointing, row.accumulation, row.clipping, row.precision, row.tile_rows)
    outcome = managed.least(row, managed.limits_of(row), directory)
    unseen = {"gradients"} if row.step == "in_backward" else set()
    if not outcome.record.norms:
        unseen.add("norms")  # `max_grad_norm` clips inside `step()`
    found = differences(expected, outcome.record, unseen=unseen)
    if found:
        pytest.fail("\n".join([f"{row} at {outcome.limits}", *found]), pytrace=False)
    for name, parameter in outcome.closed.items():
        if row.precision == "fp32":
            assert same_bits(expected.weights[name], parameter), f"{row}: {name} changed in close()"
    assert outcome.stats.steps == STEPS - expected.skipped
    if row.budget != "fits":
        still = [link for link in LINKS[row.tier] if not outcome.stats.moved[link]]
        if expected.skipped:  # moments that one update has written may never be read again
            still = still if len(still) == len(LINKS[row.tier]) else []
        assert not still, f"{row} at {outcome.limits}: nothing moved over {still}, which shows nothing"


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_no_bit_depends_on_where_model_data_lives(row: Row, tmp_path: Path) -> None:
    assert_parity(row, tmp_path)


@pytest.mark.parametrize("row", BF16_ROWS, ids=str)
def test_no_bit_depends_on_where_bf16_model_data_lives(row: Row, tmp_path: Path) -> None:
    assert_parity(row, tmp_path)


@pytest.mark.parametrize("row", FP16_ROWS, ids=str)
def test_no_bit_depends_on_where_fp16_model_data_lives(row: Row, tmp_path: Path) -> None:
    assert_parity(row, tmp_path)


@pytest.mark.parametrize("row", WIDENED_ROWS, ids=str)
def test_no_bit_depends_on_where_weights_live_that_are_widened_to_compute(row: Row, tmp_path: Path) -> None:
    assert_parity(row, tmp_path)


@pytest.mark.parametrize("row", TILED_ROWS, ids=str)
def test_no_bit_depends_on_where_weights_live_that_are_used_in_tiles(row: Row, tmp_path: Path) -> None:
    assert_parity(row, tmp_path)


@pytest.mark.parametrize("row", TABLE_ROWS, ids=str)
def test_no_bit_depends_on_tables_of_which_only_rows_leave_the_host(row: Row, tmp_path: Path) -> None:
    assert_parity(row, tmp_path)
