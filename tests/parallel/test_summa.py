"""Products of matrices in blocks, their gradients and the gradients of these, are those of whole matrices; so are their bytes, and their memory."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest

from patrickstar.parallel.grid import chunk_sizes
from tests.parallel import programs_of_2d
from tests.ranks import Teams, all_well

SHAPES = [{"m": 6, "k": 6, "n": 6}, {"m": 12, "k": 6, "n": 18}, {"m": 5, "k": 7, "n": 4}, {"m": 7, "k": 4, "n": 9}]
THREE = pytest.param(3, marks=pytest.mark.campaign)


@pytest.mark.parametrize("q", [2, THREE])
@pytest.mark.parametrize("name", ["ab", "abt", "atb"])
def test_products_gradients_and_theirs_are_those_of_whole_matrices(team_of: Teams, name: str, q: int) -> None:
    for sizes in SHAPES:
        for answer in all_well(team_of(q * q).run(programs_of_2d.product, q, name, sizes)):
            assert len(answer["errors"]) == 5
            assert max(answer["errors"]) <= 1e-12, sizes


LINES = {"ab": {"col": "mk", "row": "kn"}, "abt": {"row": "kn", "col": "mk"}, "atb": {"col": "mk", "row": "kn"}}
"""The matrix of which panels come, or parts are summed, along each line."""


@pytest.mark.parametrize("q", [2, THREE])
@pytest.mark.parametrize("name", ["ab", "abt", "atb"])
def test_a_rank_sends_its_part_of_two_matrices_and_twice_that_backward(team_of: Teams, name: str, q: int) -> None:
    for sizes in SHAPES:
        for rank, answer in enumerate(all_well(team_of(q * q).run(programs_of_2d.product, q, name, sizes))):
            i, j = divmod(rank, q)
            own = {"m": chunk_sizes(sizes["m"], q)[i], "n": chunk_sizes(sizes["n"], q)[j], "k": sizes["k"]}
            numel = {line: own[a] * own[b] for line, (a, b) in LINES[name].items() if own[a] * own[b]}
            once, thrice = (
                {line: ceil(Fraction((q - 1) * 8 * times * n, q)) for line, n in numel.items()} for times in (1, 3)
            )
            assert answer["sent"] == once
            assert answer["backward"] == {line: thrice[line] - once[line] for line in once}


@pytest.mark.parametrize("name", ["ab", "abt", "atb"])
def test_no_whole_panel_is_ever_there(team_of: Teams, name: str) -> None:
    for answer in all_well(team_of(4).run(programs_of_2d.product, 2, name, {"m": 64, "k": 32, "n": 48})):
        c, a, b = answer["blocks"]
        # The result, and a received block of each matrix that travels; or two parts of a sum.
        assert answer["peak"] == {"ab": c + a + b, "abt": 2 * c + b, "atb": 2 * c + a}[name]


@pytest.mark.parametrize(
    ("size", "q", "sizes"), [(6, 3, [2, 2, 2]), (7, 3, [3, 3, 1]), (5, 4, [2, 2, 1, 0]), (4, 3, [2, 2, 0])]
)
def test_blocks_are_those_of_chunk(size: int, q: int, sizes: list[int]) -> None:
    assert chunk_sizes(size, q) == sizes


def test_a_mesh_of_one_rank_changes_no_bit(team_of: Teams) -> None:
    (found,) = all_well(team_of(1).run(programs_of_2d.alone))
    assert found == {"product": True, "loss": True, "no labels": True, "whole": True, "model": True, "calls": {}}
