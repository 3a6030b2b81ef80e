"""What goes from whom to whom where the number of ranks changes: nothing is lost, nothing comes twice, and little more than must be moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.resharding import Resharding, order_of_least_movement

NUMEL = 840


def change(old: int, new: int) -> Resharding:
    present = tuple(range(old))
    return Resharding(present, order_of_least_movement(present, new, range(100, 200)))


@given(st.integers(1, 8), st.integers(1, 8))
def test_each_element_goes_where_it_belongs(old: int, new: int) -> None:
    moves, shares = change(old, new), {}
    for member in moves.members:
        if member in moves.old:
            place = moves.old.index(member) * NUMEL // old
            held = list(range(place, place + NUMEL // old))
        else:
            held = []
        for other, count in zip(moves.members, moves.sent(member, NUMEL), strict=True):
            shares[other] = shares.get(other, []) + held[:count]
            held = held[count:]
        assert not held
    for rank, member in enumerate(moves.new):
        assert shares[member] == list(range(rank * NUMEL // new, (rank + 1) * NUMEL // new))
        assert moves.received(member, NUMEL) == [
            moves.sent(one, NUMEL)[moves.members.index(member)] for one in moves.members
        ]


@pytest.mark.parametrize("old", [1, 2, 3, 4])
@pytest.mark.parametrize("new", [1, 2, 3, 4])
def test_the_first_stays_and_little_more_than_must_be_is_moved(old: int, new: int) -> None:
    moves = change(old, new)
    assert moves.new[0] == 0
    assert len(moves.new) == new
    stays = sum(moves.sent(member, old * new)[moves.members.index(member)] for member in moves.old)
    assert 1 - stays / (old * new) <= 1.35 * moves.least
