"""The order of samples: of a seed alone, each sample once an epoch, for any number of ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from patrickstar.session.sample_order import Draws, SampleOrder


@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 50))
def test_each_sample_is_seen_once_an_epoch(size: int, seed: int, at: int) -> None:
    order = SampleOrder(size, seed)
    epochs = [order.indices(epoch * size, size) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert size < 8 or len({tuple(epoch) for epoch in epochs}) == 3
    # From any place on, also backwards, as after a loss.
    assert order.indices(at, size) == [*epochs[0], *epochs[1], *epochs[2], *order.indices(3 * size, at)][at : at + size]


@given(st.integers(1, 4), st.sampled_from([4, 6, 8]), st.integers(0, 3))
def test_ranks_draw_all_parts_between_them(size: int, parts: int, step: int) -> None:
    draws = Draws(SampleOrder(29, 3), 2, ((0, 2 * parts),), seed=3, steps=4)
    of_one = list(draws.of_rank(step, 0, 1))
    of_ranks = [iter(draws.of_rank(step, rank, size)) for rank in range(size)]
    assert [next(of_ranks[part % size]) for _ in range(step, 4) for part in range(parts)] == of_one
    assert len({draw.seed for draw in of_one}) == len(of_one)
