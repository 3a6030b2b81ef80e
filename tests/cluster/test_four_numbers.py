"""The job model of traces against its formula, written out once more."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.cluster.four_numbers import FourNumbers


def seconds(speed, n, k):
    serial, noise = speed.serial, speed.noise
    samples = (noise + k) / (k * (noise + 1))
    step = (serial + (1 - serial) * k / n) / (serial + (1 - serial) / speed.gpus)
    return speed.duration * samples * step


speeds = st.builds(
    FourNumbers,
    gpus=st.integers(1, 48),
    duration=st.floats(1, 1e5),
    serial=st.floats(0, 1),
    noise=st.floats(0, 1000),
    grow=st.sampled_from([1.0, 2.0, 16.0]),
)


@given(speeds, st.integers(1, 64), st.floats(0, 1))
def test_a_job_takes_the_seconds_of_the_formula(speed, n, share):
    low, high = speed.batches()
    k = low + share * (high - low)
    assert speed.work / speed.useful_per_s(n, batch=k) == pytest.approx(seconds(speed, n, k))


@given(speeds, st.integers(1, 64))
def test_no_other_batch_is_better_than_the_best(speed, n):
    best = speed.best_batch(n)
    low, high = speed.batches()
    assert low <= best <= high
    others = min(seconds(speed, n, k) for k in np.geomspace(low, high, 30))
    assert seconds(speed, n, best) <= others * (1 + 1e-9)
    assert speed.work / speed.best_rates([n])[0] == pytest.approx(seconds(speed, n, best))
    assert speed.work / speed.own_rates([n])[0] == pytest.approx(seconds(speed, n, 1))


def test_a_batch_may_be_smaller_only_where_it_may_grow():
    assert FourNumbers(gpus=4, duration=1.0).batches() == (1.0, 1.0)
    assert FourNumbers(gpus=4, duration=1.0, grow=2.0).batches() == (0.25, 2.0)


def test_on_the_gpus_asked_for_with_its_own_batch_it_takes_its_duration():
    assert FourNumbers(gpus=6, duration=965.6, serial=0.068, noise=2.4).own_rates([6])[0] == pytest.approx(6.0)
