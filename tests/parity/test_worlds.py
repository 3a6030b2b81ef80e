"""No number of ranks changes a bit that the formula does not: each rank against one plain process that has the gradients of all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import patrickstar
from tests.parity import managed, oracle
from tests.parity.compare import differences, same_bits
from tests.parity.cover import few_ranks
from tests.parity.limits import LIMITED, PAGE_BYTES
from tests.parity.managed import Limits, Outcome
from tests.parity.matrix import RANKS, Row
from tests.parity.oracle import Record
from tests.parity.test_parity import LINKS, at_once
from tests.parity.zoo import CASES, STEPS
from tests.ranks import Team, Teams, all_well

# What `make test` runs: those that take least time.
FEW = frozenset(row for row in few_ranks(RANKS) if row.budget != "minimum" and (row.accumulation == 1 or row.no_sync))

_ATTEMPTS = 12


@lru_cache(maxsize=2)  # rows that share an oracle follow each other
def want(row: Row, device: str = "cpu") -> list[Record]:
    """The same run in plain PyTorch, of each rank."""
    names = ("checkpointing", "accumulation", "clipping", "precision", "no_sync")
    return oracle.train_ranks(
        CASES[row.model], row.world, device=device, **{name: getattr(row, name) for name in names}
    )


def train(rank: int, row: Row, limits: Limits, directory: Path, steps: int, device: str = "cpu") -> Any:
    """The run of one rank, as far as it can be sent."""
    with tempfile.TemporaryDirectory(dir=directory) as disk:
        outcome = managed.train(row, limits, Path(disk), rank=rank, steps=steps, device=device)
    return outcome.record, outcome.stats, outcome.closed


Train = Callable[[int, Row, Limits, Path, int], Any]


def train_all(
    team: Team, row: Row, limits: Limits, directory: Path, steps: int = STEPS, act: Train = train
) -> list[Outcome]:
    """The run of all ranks. BudgetError: the largest need of those that have refused; the others have heard of it."""
    answers = team.run(act, row, limits, directory, steps, within_s=300)
    refusals = [answer for answer in answers if isinstance(answer, patrickstar.BudgetError)]
    if refusals:
        raise max(refusals, key=lambda refusal: refusal.smallest_bytes)
    return [Outcome(record, stats, limits, closed) for record, stats, closed in all_well(answers)]


def least(team: Team, row: Row, directory: Path, steps: int = STEPS, act: Train = train) -> list[Outcome]:
    """The run in the smallest budgets that refusals name, of each rank."""
    limits = dict.fromkeys(LIMITED[row.tier], PAGE_BYTES)
    for _ in range(_ATTEMPTS):
        try:
            return train_all(team, row, limits, directory, steps, act)
        except patrickstar.BudgetError as refusal:
            tier, smallest = str(refusal.tier), refusal.smallest_bytes
            assert limits[tier] < smallest, f"{row}: {tier} refused {limits[tier]} and named {smallest} bytes"
            limits = {**limits, tier: smallest}
    raise AssertionError(f"{row}: still refused after {_ATTEMPTS} budgets that refusals had named, the last {limits}")


def in_its_budget(team: Team, row: Row, directory: Path, steps: int = STEPS) -> list[Outcome]:
    """The run in the budget of the row; halfway to where everything fits are as many bytes again as the smallest has, and a half."""
    if row.budget == "fits":
        return train_all(team, row, {}, directory, steps)
    if row.budget == "minimum":
        return least(team, row, directory, steps)
    # What is thawed on the way needs more than a first step shows.
    outcomes = least(team, row, directory, steps=steps if row.model == "thawed" else 1)
    return train_all(
        team, row, {tier: 3 * smallest // 2 for tier, smallest in outcomes[0].limits.items()}, directory, steps
    )


def assert_moved(row: Row, outcomes: list[Outcome]) -> None:
    """Fails where something stayed where it was on all ranks, so that the run has shown nothing."""
    still = [link for link in LINKS[row.tier] if not any(outcome.stats.moved[link] for outcome in outcomes)]
    assert not still, f"{row} at {outcomes[0].limits}: nothing moved over {still}, which shows nothing"


def assert_parity(row: Row, outcomes: list[Outcome], device: str = "cpu") -> None:
    """Fails with the first differences of any rank, in the order in which training meets them."""
    for rank, (expected, outcome) in enumerate(zip(want(row, device), outcomes, strict=True)):
        assert outcome.stats.steps == STEPS - expected.skipped
        unseen = () if outcome.record.norms else {"norms"}
        found = differences(expected, outcome.record, unseen=unseen, any_nan=expected.skipped > 0)
        if found:
            pytest.fail("\n".join([f"{row}, rank {rank} at {outcome.limits}", *found]), pytrace=False)
        for name, parameter in outcome.closed.items():
            assert same_bits(expected.weights[name], parameter), f"{row}, rank {rank}: {name} changed in close()"


@pytest.mark.parametrize("row", at_once(RANKS, FEW), ids=str)
def test_no_bit_depends_on_how_ranks_share_model_data(row: Row, team_of: Teams, tmp_path: Path) -> None:
    outcomes = in_its_budget(team_of(row.world), row, tmp_path)
    assert_parity(row, outcomes)
    if row.budget == "minimum":
        assert_moved(row, outcomes)
