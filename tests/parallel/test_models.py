"""Models of `transformers` over ranks are the models on one: loss, logits and the gradient of each parameter."""

from __future__ import annotations

import pytest

from tests.parallel import programs_of_models as programs
from tests.ranks import Teams, all_well

KINDS = ["llama", "gpt2", "bert"]


@pytest.mark.parametrize("n", [2, 4])
def test_models_over_ranks_are_those_of_one(team_of: Teams, n: int) -> None:
    for found in all_well(team_of(n).run(programs.errors, n, KINDS, list(programs.BATCHES), within_s=200)):
        assert {case: worst for case, worst in found.items() if not worst <= 1e-11} == {}
