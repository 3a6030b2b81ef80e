"""Decisions of each policy on states by hand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.cluster.gpu_ids import assign
from patrickstar.cluster.job_view import Cluster
from patrickstar.cluster.policies.catalogue import POLICIES
from patrickstar.cluster.policies.greedy import share_out, size_grid
from patrickstar.cluster.policies.rigid import THRESHOLD_GPU_S
from tests.cluster.traces import view

EIGHT = Cluster(gpus=8, gpus_per_node=4)


def decide(policy, *jobs, state=None, cluster=EIGHT):
    found, _ = POLICIES[policy].decide(jobs, cluster, 0.0, state, np.random.default_rng(0))
    assert all(one.why for one in found.values())
    return {name: len(one.gpu_ids) for name, one in found.items()}


def test_fifo_lets_nobody_overtake_and_srtf_passes_over_what_does_not_fit():
    jobs = view("a", 6, 500.0, submit=0.0), view("b", 4, 50.0, submit=1.0), view("c", 2, 400.0, submit=2.0)
    assert decide("fifo", *jobs) == {"a": 6}
    assert decide("srtf", *jobs) == {"b": 4, "c": 2}


def test_higher_priorities_come_first_and_those_that_run_stay_under_fifo():
    first, urgent = view("a", 8, 500.0), view("b", 8, 900.0, submit=1.0, priority=1)
    assert decide("fifo", first, urgent) == {"b": 8}
    running = dataclasses.replace(first, gpu_ids=tuple(range(8)))
    assert decide("fifo", running, urgent) == {"a": 8}
    assert decide("srtf", running, urgent) == {"b": 8}


def test_las_puts_jobs_with_much_service_behind_all_others_in_the_order_in_which_they_passed():
    long = view("a", 8, attained=THRESHOLD_GPU_S, gpu_ids=tuple(range(8)))
    assert decide("las", long, view("b", 8, submit=5.0)) == {"b": 8}
    assert decide("las", dataclasses.replace(long, attained=THRESHOLD_GPU_S - 1), view("b", 8, submit=5.0)) == {"a": 8}
    other = view("b", 8, submit=5.0, attained=THRESHOLD_GPU_S)
    assert decide("las", long, other, state=("b",)) == {"b": 8}


def test_optimus_gives_gpus_where_they_save_most_seconds_and_soonest_to_short_jobs_too():
    long, short = view("a", 1, 10_000.0), view("b", 1, 200.0)
    assert decide("optimus", long, short) == {"a": 7, "b": 1}
    assert decide("soonest", long, short)["b"] > 1


def test_pollux_doubles_at_most_and_does_not_ask_what_remains():
    jobs = view("a", 1, 1000.0, largest=1), view("b", 1, 1000.0, largest=4)
    assert decide("pollux", *jobs) == {"a": 2, "b": 6}
    assert decide("pollux", view("a", 1, largest=0)) == {"a": 1}
    for rest in (1.0, 1e9):
        assert decide("pollux", dataclasses.replace(jobs[0], rest=rest), jobs[1]) == {"a": 2, "b": 6}


def test_soonest_leaves_a_job_as_it_is_where_a_change_does_not_pay():
    job = view("a", 4, 100.0, gpu_ids=(0, 1, 2, 3), serial=0.05, max_gpus=8)
    assert decide("soonest", job) == {"a": 8}
    nearly = dataclasses.replace(job, rest=4.0)  # a second of work
    assert decide("soonest", nearly) == {"a": 4}
    assert decide("soonest", nearly, cluster=dataclasses.replace(EIGHT, resize_s=0.0)) == {"a": 8}


def test_where_there_are_more_jobs_than_gpus_soonest_runs_the_shortest():
    jobs = [view(f"{n}", 1, 100.0 * (1 + n * 7 % 10), submit=float(n)) for n in range(10)]
    found = decide("soonest", *jobs)
    assert set(found) == {job.name for job in sorted(jobs, key=lambda job: job.rest)[:8]}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_job_keeps_what_it_has_and_sizes_stay_within_bounds(policy):
    pinned = view("a", 2, 9000.0, gpu_ids=(5, 6), pinned=True, attained=1e6, epochs=9, samples=1.0)
    jobs = [view(f"{n}", 4, 50.0, submit=float(n), min_gpus=3, max_gpus=5, largest=4) for n in range(4)]
    found, _ = POLICIES[policy].decide((pinned, *jobs), EIGHT, 0.0, None, np.random.default_rng(0))
    assert found["a"].gpu_ids == (5, 6)
    assert all(3 <= len(one.gpu_ids) <= 5 for name, one in found.items() if name != "a")
    assert len(found) > 1


def test_growth_steps_over_a_plateau():
    plateau = np.array([1.0, 1.0, 1.0, 9.0])
    slope = np.array([1.0, 2.0, 2.5, 2.6])
    jobs, sizes = [view("a"), view("b")], (1, 2, 3, 4)
    assert share_out(jobs, [plateau, slope], sizes, 5) == {"a": 4, "b": 1}
    # Three more GPUs for 8 are worth more than one for 1, but do not fit: then those that do.
    assert share_out(jobs, [plateau, slope], sizes, 4) == {"a": 1, "b": 3}


def test_nothing_is_given_where_nothing_is_gained():
    assert share_out([view("a")], [np.array([2.0, 1.0, 1.5])], (1, 2, 3), 3) == {"a": 1}


def test_sizes_worth_a_look_have_all_that_jobs_ask_for():
    jobs = [view("a", 100, min_gpus=77, max_gpus=333)]
    grid = size_grid(jobs, Cluster(gpus=1024))
    assert {1, 64, 77, 100, 333, 1024} <= set(grid)
    assert list(grid) == sorted(set(grid))
    assert len(grid) < 120


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=6), st.randoms())
@settings(max_examples=60)
def test_ids_are_for_one_job_each_and_only_changed_jobs_move(sizes, random):
    cluster, free = Cluster(gpus=24), list(range(24))
    random.shuffle(free)
    jobs, wanted, left = [], {}, 24
    for number, (now, then) in enumerate(sizes):
        held = tuple(sorted(free[:now]))
        del free[:now]
        jobs.append(view(f"{number}", gpu_ids=held))
        wanted[f"{number}"] = min(then, left)
        left -= wanted[f"{number}"]
    found = assign(jobs, wanted, cluster)
    ids = [gpu for gpus in found.values() for gpu in gpus]
    assert len(ids) == len(set(ids))
    for job in jobs:
        gpus = set(found.get(job.name, ()))
        assert len(gpus) == wanted[job.name]
        assert gpus <= set(job.gpu_ids) or set(job.gpu_ids) <= gpus


def test_a_job_gets_the_fullest_node_that_holds_it():
    running = view("a", gpu_ids=(0, 1)), view("b", gpu_ids=(4,))
    assert assign([*running, view("c")], {"a": 2, "b": 1, "c": 1}, EIGHT)["c"] == (2,)
    sizes = {"a": 2, "b": 1, "c": 2, "d": 3}
    found = assign([*running, view("c"), view("d")], sizes, EIGHT)
    assert (found["c"], found["d"]) == ((2, 3), (5, 6, 7))
