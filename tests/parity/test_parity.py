"""No budget, tier, policy or way of stepping changes a bit: the library against plain PyTorch, row by row.

Each row trains five steps in both, with slots poisoned as they are given back, and compares bit patterns: every loss,
every gradient, norms, evaluations between steps, then weights, both moments, update counts and buffers. It runs in the
budget that is known for it (`limits.py`), at which the plans are those that are known (`plans.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import patrickstar
from tests.parity import managed, oracle
from tests.parity.compare import differences, same_bits
from tests.parity.cover import every, quick_first
from tests.parity.forecasts import compare
from tests.parity.lanes import choice_of
from tests.parity.limits import PAGE_BYTES, is_known_here, limits_of
from tests.parity.matrix import DIMENSIONS, PAIRS, WIDE, Row
from tests.parity.oracle import Record
from tests.parity.plans import APART, DIGESTS, FORECASTS, digest, forecast_digest, recorded
from tests.parity.zoo import CASES, STEPS
from tests.sampling import cover

pytestmark = pytest.mark.slow

# What `make test` runs: every value of each dimension, and each way of stepping and each budget on each machine, by quick models.
OTHERS = [name for name in DIMENSIONS if name != "model"]
FEW = frozenset(
    cover(sorted(PAIRS, key=quick_first), every(*((name,) for name in OTHERS), ("step", "tier"), ("tier", "budget")))
)

# Links over which a run must have moved bytes, or it has shown nothing about moving them.
LINKS = {
    "emulated": ("H>D", "D>H"),
    "cpu+disk": ("K>H", "H>K"),
    "emulated+disk": ("H>D", "D>H", "K>H", "H>K"),
}


@lru_cache(maxsize=4)  # rows are sorted so that those with one oracle follow each other
def _want(model: str, device: str, **arguments: Any) -> Record:
    return oracle.train(CASES[model], device=device, **arguments)


def want(row: Row, device: str = "cpu") -> Record:
    """The same run in plain PyTorch."""
    names = ("checkpointing", "accumulation", "clipping", "precision", "tile_rows")
    return _want(row.model, device, **{name: getattr(row, name) for name in names})


def assert_moved(row: Row, outcome: managed.Outcome, expected: Record) -> None:
    """Fails where something stayed where it was, so that the run has shown nothing."""
    assert outcome.stats.steps == STEPS - expected.skipped
    if row.budget != "fits":
        still = [link for link in LINKS[row.tier] if not outcome.stats.moved[link]]
        if expected.skipped:  # moments that one update has written may never be read again
            still = still if len(still) == len(LINKS[row.tier]) else []
        assert not still, f"{row} at {outcome.limits}: nothing moved over {still}, which shows nothing"


def assert_parity(row: Row, directory: Path, *, plans_too: bool = False) -> None:
    """Runs the row and fails with the first differences, in the order in which training meets them.

    `plans_too`: whether plans are compared even where that takes another run, in which updates are apart and nothing begins early.
    """
    outcome, plans, expected = run(row, directory)
    assert_moved(row, outcome, expected)
    is_known = is_known_here(row) and (plans_too or choice_of(row) == APART)
    if is_known and digest(plans) != DIGESTS[str(row)]:
        # Where a step departs while transfers are early, later plans start elsewhere: those of a run that has none early are known.
        with recorded() as plans:
            managed.train(row, limits_of(row), directory / "disk", prefetch=0, choice=APART)
        assert digest(plans) == DIGESTS[str(row)], (
            f"{row}: plans are other than they were; `make plans` where that is meant"
        )


def run(row: Row, directory: Path) -> tuple[managed.Outcome, list[Any], Record]:
    """Runs the row, which has the oracle's bits; gives its outcome, its plans, and the oracle's record."""
    expected = want(row)
    limits = limits_of(row)
    try:
        with recorded() as plans:
            outcome = managed.train(row, limits, directory / "disk")
    except patrickstar.BudgetError as refusal:
        pytest.fail(f"{row} needs more than {limits} now; where that is meant, run `make limits`\n{refusal}")
    unseen = {"gradients"} if row.step == "in_backward" else set()
    if not outcome.record.norms:
        unseen.add("norms")  # `max_grad_norm` clips inside `step()`
    found = differences(expected, outcome.record, unseen=unseen, any_nan=row.tile_rows is not None)
    if found:
        pytest.fail("\n".join([f"{row} at {outcome.limits}", *found]), pytrace=False)
    for name, parameter in outcome.closed.items():
        assert same_bits(expected.weights[name], parameter), f"{row}: {name} changed in close()"
    return outcome, plans, expected


def assert_least(row: Row, directory: Path) -> None:
    """Less than the smallest budget is refused, on each tier."""
    limits = limits_of(row)
    for tier, nbytes in limits.items():
        less = {**limits, tier: nbytes - PAGE_BYTES}
        with pytest.raises(patrickstar.BudgetError) as refusal:
            managed.train(row, less, directory / tier)
        assert refusal.value.tier == tier, (
            f"{row}: {tier} was given {less[tier]} bytes, and {refusal.value.tier} refused"
        )


def at_least(rows: tuple[Row, ...]) -> list[Row]:
    return [row for row in rows if row.budget == "minimum"]


def where_everything_fits(rows: Sequence[Row]) -> list[Row]:
    """The rows in which parameters may keep their bytes."""
    return [row for row in rows if (row.budget, row.tile_rows) == ("fits", None)]


def binding_of(row: Row) -> str:
    """What such a row says of its binding."""
    in_parts = (row.model, row.checkpointing, row.step) == ("tied", "reentrant", "deferred")
    return "gradients of 16 bits come in parts" if in_parts and row.precision != "fp32" else "whole"


def at_once(rows: Sequence[Row], few: Collection[Row] = FEW) -> list[object]:
    """The rows, of which those that `make test` leaves out are campaigns."""
    return [pytest.param(row, marks=() if row in few else pytest.mark.campaign) for row in rows]


@pytest.mark.parametrize("row", at_once(PAIRS), ids=str)
def test_no_bit_depends_on_where_model_data_lives(row: Row, tmp_path: Path) -> None:
    assert_parity(row, tmp_path, plans_too=row not in FEW)


WHOLE = where_everything_fits((*PAIRS, *WIDE))
# Models that neither `tests/session/test_simulation.py` nor `test_forecasts.py` has each time.
REST = {name for number, name in enumerate(CASES) if number % 4 and number % 3} - {row.model for row in FEW}
STILL = [row for row in WHOLE if row.model in REST]
FEW_WHOLE = [
    *cover(sorted(WHOLE, key=quick_first), every(("checkpointing",), ("tier",), ("precision", "step"))),
    *cover(sorted(STILL, key=quick_first), every(("model",))),
]


@pytest.mark.whole
@pytest.mark.parametrize("row", at_once(WHOLE, FEW_WHOLE), ids=str)
def test_parameters_that_keep_their_bytes_have_the_same_bits(row: Row, tmp_path: Path) -> None:
    outcome, _, _ = run(row, tmp_path)
    assert binding_of(row) in outcome.stats.binding


IN_BLOCKS = sorted((row for row in PAIRS if row.tile_rows is None), key=quick_first)
OF_BLOCKS = [row for row in IN_BLOCKS if row.model in ("gpt2", "llama", "bert")]


@pytest.mark.blocks
@pytest.mark.parametrize("row", at_once(IN_BLOCKS, cover(OF_BLOCKS, every(("step",), ("checkpointing",)))), ids=str)
def test_parameters_that_are_there_while_a_block_runs_have_the_same_bits(row: Row, tmp_path: Path) -> None:
    outcome, _, expected = run(row, tmp_path)
    assert_moved(row, outcome, expected)


@pytest.mark.campaign
@pytest.mark.parametrize("row", WIDE, ids=str)
def test_no_bit_depends_on_where_model_data_lives_in_any_combination(row: Row, tmp_path: Path) -> None:
    assert_parity(row, tmp_path, plans_too=True)


FEW_LEAST = cover([row for row in at_least(PAIRS) if row in FEW], every(("tier",), ("step",), ("precision",)))


@pytest.mark.parametrize("row", at_once(at_least(PAIRS), FEW_LEAST), ids=str)
def test_less_than_the_smallest_budget_is_refused(row: Row, tmp_path: Path) -> None:
    assert_least(row, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("row", at_least(WIDE), ids=str)
def test_less_than_the_smallest_budget_is_refused_in_any_combination(row: Row, tmp_path: Path) -> None:
    assert_least(row, tmp_path)


# A forecast knows no optimizer that leaves a layer out and no gradient of a gradient; and where
# the meter counts, torch's LSTM takes what no trial run on fake tensors shows.
UNFORESEEN = {"adapted", "penalised"}
FORESEEN = [row for row in PAIRS if row.model not in UNFORESEEN and (row.model, row.tier[:8]) != ("lstm", "emulated")]
FEW_FORESEEN = cover([row for row in FORESEEN if row in FEW], every(("step",), ("tier",), ("budget",)))


@pytest.mark.parametrize("row", at_once(FORESEEN, FEW_FORESEEN), ids=str)
def test_a_forecast_is_the_plan_of_a_session(row: Row, tmp_path: Path) -> None:
    compare(row, limits_of(row), tmp_path / "disk")


@pytest.mark.campaign
@pytest.mark.parametrize("name", FORECASTS)
def test_a_forecast_has_the_plans_that_are_known(name: str) -> None:
    assert forecast_digest(name) == DIGESTS[name], "plans are other than they were; `make plans` where that is meant"
