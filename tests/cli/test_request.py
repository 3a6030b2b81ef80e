import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.cli.request import LOWEST, WarmupSchedule


def test_it_rises_in_equal_steps_and_the_first_step_already_learns():
    schedule = WarmupSchedule("constant", warmup=4, steps=100)
    assert [schedule.factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_cosine_falls_to_its_lowest_at_the_end():
    schedule = WarmupSchedule("cosine", warmup=10, steps=110)
    assert schedule.factor(10) == 1.0
    assert schedule.factor(60) == pytest.approx((1 + LOWEST) / 2)
    assert schedule.factor(110) == pytest.approx(LOWEST)


@given(kind=st.sampled_from(["constant", "cosine"]), warmup=st.integers(0, 50), steps=st.integers(1, 60))
def test_every_factor_is_positive_and_at_most_one(kind, warmup, steps):
    schedule = WarmupSchedule(kind, warmup, steps)
    factors = [schedule.factor(step) for step in range(steps + 5)]
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
