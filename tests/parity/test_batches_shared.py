"""No budget changes a bit of ranks that share batches: each run against the same mesh where everything fits, and against one process."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from tests.parity import oracle
from tests.parity.compare import differences
from tests.parity.cover import few_meshes
from tests.parity.managed import Outcome, case_of
from tests.parity.matrix import MESHES, Row, sizes_of
from tests.parity.oracle import Record
from tests.parity.test_parity import at_once
from tests.parity.test_worlds import assert_moved, in_its_budget, train_all
from tests.parity.zoo import STEPS
from tests.ranks import Team, Teams

FEW = frozenset(few_meshes(MESHES))
LONG = [
    Row.parse(f"{model}-none-x1-noclip-deferred-next-use-minimum-cpu+disk-world{world}-mesh{mesh}-{method}")
    for model in ("gpt2", "llama")
    for method, world, mesh in (
        ("ring", 4, "2x2"),
        ("contiguous", 4, "1x4"),
        ("rsa", 4, "1x4"),
        ("ulysses", 2, "1x2"),
        ("2d", 4, "1x2x2"),
    )
]


@lru_cache(maxsize=2)  # rows that share an oracle follow each other
def plain(row: Row, steps: int = STEPS) -> list[Record]:
    """The same batches in plain PyTorch, of each group of ranks that share them."""
    names = ("checkpointing", "accumulation", "clipping", "precision")
    given = {name: getattr(row, name) for name in names}
    return oracle.train_ranks(case_of(row), sizes_of(row.mesh)[0], steps=steps, **given)


def roomy(team: Team, row: Row, directory: Path) -> list[Outcome]:
    """The run of the same mesh where everything fits."""
    return train_all(team, replace(row, budget="fits", tier="emulated", eviction="next-use"), {}, directory)


@pytest.mark.parametrize("row", at_once(MESHES, FEW), ids=str)
def test_no_bit_depends_on_the_budget_of_ranks_that_share_batches(row: Row, team_of: Teams, tmp_path: Path) -> None:
    team = team_of(row.world)
    want, found = roomy(team, row, tmp_path), in_its_budget(team, row, tmp_path)
    for rank, (first, second) in enumerate(zip(want, found, strict=True)):
        unlike = differences(first.record, second.record, any_nan=first.record.skipped > 0)
        assert not unlike, "\n".join([f"{row}, rank {rank} at {second.limits}", *unlike])
    if row.budget == "minimum":
        assert_moved(row, found)
    if row.precision != "fp32":
        return
    groups = plain(row)
    for rank, outcome in enumerate(found):
        one = groups[rank * len(groups) // row.world]
        assert [*map(float, outcome.record.losses)] == pytest.approx([*map(float, one.losses)], abs=2e-5)
        if outcome.record.norms:  # clipped by hand
            assert [*map(float, outcome.record.norms)] == pytest.approx([*map(float, one.norms)], rel=1e-6)


@pytest.mark.campaign
@pytest.mark.parametrize("row", LONG, ids=str)
def test_20_steps_that_move_are_those_of_one_process(row: Row, team_of: Teams, tmp_path: Path) -> None:
    groups = plain(row, steps=20)
    found = in_its_budget(team_of(row.world), row, tmp_path, steps=20)
    assert_moved(row, found)
    for rank, outcome in enumerate(found):
        losses = [*map(float, groups[rank * len(groups) // row.world].losses)]
        assert len(losses) == 20
        assert [*map(float, outcome.record.losses)] == pytest.approx(losses, abs=2e-5)
