"""Bytes that ranks hand to process groups are those of the formulas, for every kind of collective and whoever calls it."""

from __future__ import annotations

import pytest

from tests.parallel import programs_of_groups
from tests.parallel.programs_of_groups import B
from tests.ranks import Teams, all_well


@pytest.mark.parametrize("n", [2, 4])
def test_bytes_are_those_of_the_formulas(team_of: Teams, n: int) -> None:
    of_all = all_well(team_of(n).run(programs_of_groups.counted, n))
    part, root = B * (n - 1) // n, 1
    for rank, found in enumerate(of_all):
        wanted = {
            "send": B,
            "all_gather": (n - 1) * B,
            "all_gather list": (n - 1) * B,
            "reduce_scatter": part,
            "reduce_scatter list": part,
            "all_to_all": part,
            "all_to_all uneven": (n - 1) * 4,
            "broadcast": part,
            "reduce": part,
            "all_reduce": 2 * part,
            "scatter": part if rank == root else 0,
            "gather": 0 if rank == root else B,
            "functional": (n - 1) * B,
            "functional reduce_scatter": part,
            "functional all_to_all": part,
            "functional all_reduce": 2 * part,
            "a DTensor": (n - 1) * B,
        }
        assert {name: found[name] for name in wanted} == {name: ({"cp": b}, {"cp": 1}) for name, b in wanted.items()}
        assert found["barrier"] == ({}, {})
        assert list(found["no mesh"][0].values()) == [2 * part]
        if n == 4:
            assert found["two dimensions"] == ({"row": B, "col": 2 * B}, {"row": 1, "col": 2})
