"""What collectives give, in which order, and how many bytes that takes. What happens where ranks are gone is in `test_failures.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.comm.collectives import ANNOUNCEMENT_BYTES, sum_in_rank_order
from patrickstar.errors import RankError, StateError
from tests.comm import programs
from tests.ranks import Teams, all_well

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
N = 300_001  # more than is summed at once, and odd


def mean(partials: list[torch.Tensor]) -> torch.Tensor:
    """The formula: f(1/p) * (((g0 + g1) + g2) + ...)."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return torch.tensor(1 / len(partials), dtype=torch.float32) * total


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(2, torch.float32), (2, torch.bfloat16), (3, torch.float32), (3, torch.float16), (3, torch.bfloat16)]
    + [(4, torch.float32), (4, torch.float16)],
)
def test_a_reduce_has_the_bits_of_the_formula(team_of: Teams, size: int, dtype: torch.dtype) -> None:
    pieces = all_well(team_of(size).run(programs.reduced, size, N, dtype))
    partials = [programs.partial(rank, size, N, dtype) for rank in range(size)]
    wanted = mean(partials)
    assert size == 2 or not torch.equal(wanted, mean(partials[::-1])), "the order matters"
    assert size in {2, 4} or not torch.equal(wanted, wanted * size / size), "what divides has other bits"
    assert np.concatenate(pieces).tobytes() == wanted.numpy().tobytes()


@given(
    size=st.integers(2, 5),
    n=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
    at_once=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_a_sum_does_not_depend_on_how_much_is_summed_at_once(
    size: int, n: int, dtype: torch.dtype, at_once: int, seed: int
) -> None:
    torch.manual_seed(seed)
    pieces, out = torch.randn(size, n).to(dtype), torch.randn(n)
    wanted = mean(list(pieces))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patrickstar.comm.collectives._SUMMED_AT_ONCE", at_once)
        sum_in_rank_order(out, pieces, averaged=size)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (3, torch.bfloat16), (3, torch.int64)])
def test_a_gather_has_all_shards_in_the_order_of_ranks(team_of: Teams, size: int, dtype: torch.dtype) -> None:
    wanted = [float(value) for rank in range(size) for value in (rank, -rank)]
    assert all_well(team_of(size).run(programs.gathered, size, dtype)) == [wanted] * size


def test_flags_are_those_of_any_rank(team_of: Teams) -> None:
    by_rank = [[0, 1, 2, 255], [0, 0, 4, 0], [0, 0, 0, 1]]
    answers = all_well(team_of(3).run(flags_of, by_rank))
    assert answers == [[0, 1, 6, 255]] * 3


def flags_of(rank: int, by_rank: list[list[int]]) -> list[int]:
    return programs.flagged(rank, by_rank[rank])


def test_values_are_agreed_on_whatever_their_lengths(team_of: Teams) -> None:
    wanted = [[b"", b"\0", b"\0\0"], [b"", b"", b""], [b"x0", b"x1", b"x2"]]
    assert all_well(team_of(3).run(programs.agreed)) == [wanted] * 3


def test_a_collective_begins_when_the_one_before_has_ended(team_of: Teams) -> None:
    assert all_well(team_of(3).run(programs.one_after_another, 3)) == [[1.0, 2.0, 3.0] * 3] * 3


def test_collectives_of_users_and_of_other_sessions_go_on_beside(team_of: Teams) -> None:
    wanted = float(sum(rank + i for rank in range(3) for i in range(15)))
    assert all_well(team_of(3).run(programs.beside_others, 3, 15)) == [[wanted] * 3] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_the_bytes_sent_are_those_given_to_the_process_groups(team_of: Teams, size: int) -> None:
    data, besides = (size - 1) * (7 * 4 + 5 * 2), (size - 1) * (2 * ANNOUNCEMENT_BYTES + 3)
    assert all_well(team_of(size).run(programs.counted, size)) == [(data, data, besides)] * size


def test_the_end_of_a_forked_child_is_not_that_of_a_rank(team_of: Teams) -> None:
    assert all_well(team_of(2).run(programs.forks)) == [[b"0", b"1"]] * 2


def test_ranks_of_a_mesh_have_the_numbers_of_the_program(team_of: Teams) -> None:
    answers = all_well(team_of(4).run(programs.in_a_group))
    assert [out for out, _ in answers] == [[0.0, 1.0], [0.0, 1.0], [2.0, 3.0], [2.0, 3.0]]
    assert [error for _, error in answers[:2]] == [None, None]
    for _, error in answers[2:]:
        assert isinstance(error, RankError)
        assert error.ranks == (3,)
        assert "rank 2: gather even" in str(error)


def test_nothing_works_once_one_rank_has_closed(team_of: Teams) -> None:
    (mine,), (theirs,) = all_well(team_of(2).run(programs.after_closing))
    assert isinstance(mine, StateError)
    assert isinstance(theirs, RankError)
    assert (theirs.ranks, theirs.action) == ((0,), "close()")
    assert "rank 0 has closed its session" in str(theirs)


def test_a_rank_that_is_done_and_gone_does_not_fail_what_it_took_part_in(team_of: Teams) -> None:
    assert all_well(team_of(3).run(programs.ends_while_the_last_is_under_way)) == [3.0] * 3
