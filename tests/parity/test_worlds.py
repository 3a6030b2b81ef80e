"""No number of ranks changes a bit that the formula does not: each rank against one plain process that has the gradients of all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import patrickstar
from tests.parity import managed, oracle
from tests.parity.compare import differences, same_bits
from tests.parity.managed import Limits, Outcome
from tests.parity.matrix import Row
from tests.parity.oracle import Record
from tests.parity.zoo import CASES, STEPS
from tests.ranks import Team, all_well

FEW = tuple(
    map(
        Row.parse,
        (
            "tied-none-x1-clip-deferred-lru-fits-cpu+disk-bf16-world2",
            "conv-non-reentrant-x1-noclip-deferred-next-use-fits-cpu+disk-bf16-fp32-world3",
            "mixtral-none-x4-noclip-deferred-lru-fits-cpu+disk-bf16-fp32-world2",
        ),
    )
)


@pytest.fixture(scope="module")
def team_of() -> Iterator[Callable[[int], Team]]:
    """Gives the team of so many ranks, which is kept."""
    teams: dict[int, Team] = {}
    yield lambda size: teams[size] if size in teams else teams.setdefault(size, Team(size))
    for team in teams.values():
        team.end()


@lru_cache(maxsize=2)  # rows that share an oracle follow each other
def want(row: Row) -> list[Record]:
    """The same run in plain PyTorch, of each rank."""
    names = ("checkpointing", "accumulation", "clipping", "precision", "no_sync")
    return oracle.train_ranks(CASES[row.model], row.world, **{name: getattr(row, name) for name in names})


def train(rank: int, row: Row, limits: Limits, directory: Path) -> Any:
    """The run of one rank, as far as it can be sent."""
    with tempfile.TemporaryDirectory(dir=directory) as disk:
        outcome = managed.train(row, limits, Path(disk), rank=rank)
    return outcome.record, outcome.stats, outcome.closed


def train_all(team: Team, row: Row, limits: Limits, directory: Path) -> list[Outcome]:
    """The run of all ranks. BudgetError: of one that has refused; the others have heard of it."""
    answers = team.run(train, row, limits, directory, within_s=300)
    for answer in answers:
        if isinstance(answer, patrickstar.BudgetError):
            raise answer
    return [Outcome(record, stats, limits, closed) for record, stats, closed in all_well(answers)]


def assert_parity(row: Row, outcomes: list[Outcome]) -> None:
    """Fails with the first differences of any rank, in the order in which training meets them."""
    for rank, (expected, outcome) in enumerate(zip(want(row), outcomes, strict=True)):
        assert outcome.stats.steps == STEPS - expected.skipped
        found = differences(expected, outcome.record, unseen=() if outcome.record.norms else {"norms"})
        if found:
            pytest.fail("\n".join([f"{row}, rank {rank} at {outcome.limits}", *found]), pytrace=False)
        for name, parameter in outcome.closed.items():
            assert same_bits(expected.weights[name], parameter), f"{row}, rank {rank}: {name} changed in close()"


@pytest.mark.parametrize("row", FEW, ids=str)
def test_no_bit_depends_on_how_ranks_share_model_data(row: Row, team_of: Callable[[int], Team], tmp_path: Path) -> None:
    assert_parity(row, train_all(team_of(row.world), row, {}, tmp_path))
