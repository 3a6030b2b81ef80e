"""`benchmarks/bounded.py` from beginning to end on a tiny model, and its interval of a median."""

import json

import pytest
from benchmarks.overhead_sides import interval

from tests.benchmarks.scripts import run

SIZES = ["--pairs", 2, "--layers", 1, "--tokens", 16, "--width", 48, "--vocabulary", 128]


@pytest.mark.campaign
@pytest.mark.slow
def test_both_sides_take_the_same_steps_and_nothing_moves(tmp_path):
    out = tmp_path / "bounded.json"
    run("bounded.py", *SIZES, "--bounds", "tightest", 20, "--out", out)
    tightest, roomy = json.loads(out.read_text())["bounds"]
    for row in (tightest, roomy):
        assert len(row["seconds"]["plain"]) == len(row["seconds"]["managed"]) == len(row["ratios"]) == 2
    assert 1 <= tightest["of_planned_peak"] < roomy["of_planned_peak"]
    # Of a bound of 1 MiB what a process loads with its first step may take some, 44 of the 48 MiB that are left for that.
    assert (roomy["moved_bytes"], roomy["reactive_steps"]) == ({}, 0)


@pytest.mark.parametrize(("count", "rank"), [(1, 0), (4, 0), (5, 0), (8, 1), (20, 5), (24, 7)])
def test_the_interval_of_a_median_leaves_at_most_a_twentieth_on_each_side(count, rank):
    assert interval(list(range(count))) == (rank, count - 1 - rank)
