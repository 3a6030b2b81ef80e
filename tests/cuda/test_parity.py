"""No budget, tier, policy or way of stepping changes a bit on a device: the library against plain PyTorch on the same device, row by row.

The rows are those of the parity matrix that have a device, at the budgets that are known for the emulated one, under schedules of what is queued;
at each of them no race is reported. Where activations take more on this device, which has no attention of its own, they run in the budgets that
refusals name.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import patrickstar
from tests.cuda.schedules import FEW_SCHEDULES, SCHEDULES
from tests.parity import managed, oracle
from tests.parity.compare import differences
from tests.parity.cover import every, shuffled
from tests.parity.limits import limits_of
from tests.parity.matrix import DIMENSIONS, PAIRS, WIDE, Row
from tests.parity.oracle import Record
from tests.parity.zoo import CASES
from tests.sampling import cover

if TYPE_CHECKING:
    from tests.accelerator.cuda import Accelerator

ROWS = [row for row in (*PAIRS, *WIDE) if row.tier.startswith("emulated")]
OTHERS = [name for name in DIMENSIONS if name != "model"]
# What `make test` runs: every value of each dimension, and each way of stepping on either machine at each budget.
FEW = cover(sorted(ROWS, key=shuffled), every(*((name,) for name in OTHERS), ("step", "tier", "budget")))
REFUSALS = 3


@lru_cache(maxsize=4)
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
        device="cuda",
    )


def assert_parity(row: Row, directory: Path, accelerator: Accelerator, schedule: tuple[float, int]) -> None:
    expected = want(row.model, row.checkpointing, row.accumulation, row.clipping, row.precision, row.tile_rows)
    accelerator.configure(*schedule)
    outcome = run(row, directory)
    unseen = {"gradients"} if row.step == "in_backward" else set()
    if not outcome.record.norms:
        unseen.add("norms")
    found = differences(expected, outcome.record, unseen=unseen, any_nan=row.tile_rows is not None)
    assert not found, "\n".join([f"{row} at {outcome.limits}", *found])
    assert not accelerator.races()


def run(row: Row, directory: Path) -> managed.Outcome:
    limits = dict(limits_of(row))
    for attempt in range(REFUSALS):
        try:
            return managed.train(row, limits, directory / str(attempt), device="cuda")
        except patrickstar.BudgetError as refusal:
            assert refusal.smallest_bytes is not None
            assert refusal.smallest_bytes > limits[str(refusal.tier)]
            limits[str(refusal.tier)] = refusal.smallest_bytes
    return managed.train(row, limits, directory / "last", device="cuda")


def schedule_of(row: Row) -> tuple[float, int]:
    return FEW_SCHEDULES[zlib.crc32(str(row).encode()) % len(FEW_SCHEDULES)]


@pytest.mark.parametrize("row", FEW, ids=str)
def test_no_bit_depends_on_where_model_data_lives(row: Row, tmp_path: Path, accelerator: Accelerator) -> None:
    assert_parity(row, tmp_path, accelerator, schedule_of(row))


@pytest.mark.campaign
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_no_bit_depends_on_the_schedule(
    row: Row, schedule: tuple[float, int], tmp_path: Path, accelerator: Accelerator
) -> None:
    assert_parity(row, tmp_path, accelerator, schedule)
