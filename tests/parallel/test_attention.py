"""Attention over ranks is plain attention, to the last digits of fp64: outputs and each gradient, in every method."""

from __future__ import annotations

import pytest

from tests.parallel import programs_of_attention as programs
from tests.parallel.programs_of_attention import GRID
from tests.ranks import Teams, all_well


@pytest.mark.parametrize("n", [2, 4])
def test_attention_over_ranks_is_that_of_one(team_of: Teams, n: int) -> None:
    for found in all_well(team_of(n).run(programs.errors, n, GRID)):
        assert {case: worst for case, worst in found.items() if max(worst) > 1e-12} == {}
