import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.core.state import (
    COMPUTE,
    FREE,
    HOLD,
    HOLD_AFTER_BWD,
    HOLD_AFTER_FWD,
    MOVES,
    TensorState,
    chunk_state,
    move,
    next_step,
)
from patrickstar.errors import StateError

HOLDS = (HOLD, HOLD_AFTER_FWD, HOLD_AFTER_BWD)
PAIRS = list(itertools.product(TensorState, TensorState))


@pytest.mark.parametrize(("now", "to"), PAIRS)
def test_move_follows_the_table_and_names_both_states_where_it_refuses(now, to):
    if to in MOVES[now]:
        assert move(now, to) is to
    else:
        with pytest.raises(StateError) as refusal:
            move(now, to)
        assert f"in {now} cannot become {to};" in str(refusal.value)


@pytest.mark.parametrize("hold", HOLDS)
def test_every_hold_leads_into_compute_and_out_of_it_and_to_free(hold):
    assert move(hold, COMPUTE) is COMPUTE
    assert move(COMPUTE, hold) is hold
    assert move(hold, FREE) is FREE


def test_what_is_in_use_can_be_neither_freed_nor_leased_twice():
    for to in (FREE, COMPUTE):
        with pytest.raises(StateError):
            move(COMPUTE, to)


def test_what_has_no_contents_cannot_be_used_before_it_has():
    assert MOVES[FREE] == {HOLD}


def test_a_training_step_is_a_walk_through_the_table():
    state = FREE
    for to in (HOLD, COMPUTE, HOLD_AFTER_FWD, COMPUTE, HOLD_AFTER_FWD, HOLD_AFTER_BWD, COMPUTE, HOLD_AFTER_BWD):
        state = move(state, to)
    assert next_step(state) is HOLD


def test_a_step_begins_in_hold_or_free_and_not_in_compute():
    assert [next_step(state) for state in (FREE, *HOLDS)] == [FREE, HOLD, HOLD, HOLD]
    with pytest.raises(StateError, match="COMPUTE"):
        next_step(COMPUTE)


@pytest.mark.parametrize(
    ("states", "folded"),
    [
        ([], FREE),
        ([FREE, FREE], FREE),
        ([FREE, HOLD], HOLD),
        ([FREE, COMPUTE, HOLD_AFTER_BWD], COMPUTE),
        ([HOLD_AFTER_FWD, HOLD_AFTER_FWD, FREE], HOLD_AFTER_FWD),
        ([HOLD_AFTER_BWD, HOLD_AFTER_BWD], HOLD_AFTER_BWD),
        ([HOLD_AFTER_FWD, HOLD_AFTER_BWD], HOLD),
        ([HOLD, HOLD_AFTER_BWD], HOLD),
    ],
)
def test_a_chunk_folds_the_states_of_its_tensors(states, folded):
    assert chunk_state(states) is folded


@settings(deadline=None)
@given(st.lists(st.sampled_from(TensorState), min_size=1))
def test_the_fold_depends_on_neither_order_nor_grouping(states):
    assert chunk_state(reversed(states)) is chunk_state(states)
    half = len(states) // 2
    assert chunk_state([chunk_state(states[:half]), chunk_state(states[half:])]) is chunk_state(states)
