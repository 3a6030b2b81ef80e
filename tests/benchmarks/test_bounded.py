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
    run("bounded.py", *SIZES, "--bounds", "tightest", "--out", out)
    result = json.loads(out.read_text())
    (row,) = result["bounds"]
    assert len(row["seconds"]["plain"]) == len(row["seconds"]["managed"]) == len(row["ratios"]) == 2
    assert (row["moved_bytes"], row["reactive_steps"]) == ({}, 0)
    assert row["of_planned_peak"] >= 1


@pytest.mark.parametrize(("count", "rank"), [(1, 0), (4, 0), (5, 0), (8, 1), (20, 5), (24, 7)])
def test_the_interval_of_a_median_leaves_at_most_a_twentieth_on_each_side(count, rank):
    assert interval(list(range(count))) == (rank, count - 1 - rank)
