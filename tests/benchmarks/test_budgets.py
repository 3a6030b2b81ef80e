"""The bound of a step in `benchmarks/budgets.py`."""

import pytest

from tests.benchmarks.scripts import script

DISK = {"read": 2.0, "write": 4.0, "both": 2.5}


@pytest.fixture(scope="module")
def budgets():
    return script("benchmarks", "budgets")


@pytest.mark.parametrize(
    ("forward", "backward", "seconds"),
    [
        ((0, 0), (0, 0), 3.0),  # computing alone
        # What the forward reads takes longer than the forward and the update, and the backward comes after it.
        ((8, 0), (0, 0), 5.0),
        ((0, 0), (8, 0), 6.0),  # the update goes beside the forward, which has nothing to wait for
        ((0, 6), (0, 8), 5.6),  # all that moves, whenever it does
        ((1, 8), (1, 6), 6.4),
        ((0, 40), (0, 0), 16.0),
    ],
)
def test_a_step_takes_as_long_as_its_halves_or_all_that_is_moved(budgets, forward, backward, seconds):
    moved = [{"K>H": read, "H>K": written} for read, written in (forward, backward, (0, 0))]
    assert budgets.bound([1.5, 1.0, 0.5], moved, DISK) == pytest.approx(seconds)


def test_what_is_written_goes_at_most_at_the_speed_of_writing(budgets):
    moved = [{"K>H": 0, "H>K": 20}, {"K>H": 0, "H>K": 20}, {"K>H": 0, "H>K": 0}]
    assert budgets.bound([1.5, 1.0, 0.5], moved, {**DISK, "both": 100.0}) == pytest.approx(10.0)
