"""core/fixed_costs.py: what a budget holds beside chunks and activations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.fixed_costs import WORKSPACE_BYTES, FixedCosts, WorkspaceCosts
from patrickstar.units import MIB

FLOOR = 256 * MIB
BUDGETS = st.integers(0, 4 * FLOOR) | st.integers(FLOOR - 64 * MIB, FLOOR + MIB)


def room(budget: int) -> int:
    return FixedCosts(budget, FLOOR).room_bytes


def test_a_budget_from_the_floor_on_is_what_is_used_one_per_cent_of_it_and_48_mib():
    for budget in (FLOOR, 1000 * MIB, 64 * 1024 * MIB):
        used = room(budget)
        assert used + used // 100 + 48 * MIB == pytest.approx(budget, abs=2)


def test_a_budget_well_below_the_floor_is_all_room():
    assert room(200 * MIB) == 200 * MIB
    assert FixedCosts(200 * MIB, FLOOR).set_aside_bytes == 0


def test_a_budget_just_below_the_floor_gives_what_the_floor_gives_and_with_what_comes_on_top_stays_below_it():
    assert room(FLOOR - 1) == room(FLOOR)
    assert room(FLOOR) * 101 // 100 + 48 * MIB <= FLOOR


def test_where_nothing_is_counted_a_budget_is_all_room():
    none = FixedCosts(1000 * MIB)
    assert (none.room_bytes, none.set_aside_bytes, none.beside(900 * MIB)) == (1000 * MIB, 0, 0)


@given(BUDGETS, st.integers(0, 32 * MIB))
def test_a_larger_budget_never_gives_less_room(budget, more):
    assert room(budget) <= room(budget + more)


@given(st.integers(1, 4 * FLOOR))
def test_a_need_and_what_comes_beside_it_is_the_smallest_budget_that_has_room_for_it(need):
    smallest = need + FixedCosts(0, FLOOR).beside(need)
    assert room(smallest) >= need
    assert room(smallest - 1) < need


@pytest.mark.parametrize("percent", [1, 3, 50, 99])
@given(need=st.integers(0, 1 << 45))
def test_the_smallest_budget_of_a_device_has_room_for_the_need_and_one_byte_less_has_not(percent: int, need: int):
    smallest = need + WorkspaceCosts(percent=percent).beside(need)
    costs = WorkspaceCosts(smallest, percent=percent)
    assert costs.room_bytes >= need
    assert costs.set_aside_bytes >= WORKSPACE_BYTES
    assert WorkspaceCosts(smallest - 2, percent=percent).room_bytes <= need


def test_without_a_percentage_a_device_s_budget_is_all_room():
    none = WorkspaceCosts(1000 * MIB)
    assert (none.room_bytes, none.set_aside_bytes, none.beside(900 * MIB)) == (1000 * MIB, 0, 0)
