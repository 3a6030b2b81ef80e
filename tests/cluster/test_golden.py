"""Known workloads: what policies make of them stays within bounds, and what is claimed of ours holds."""

from functools import cache
from pathlib import Path

import pytest

from patrickstar.cluster.figures import figures
from patrickstar.cluster.job_view import Cluster
from patrickstar.cluster.policies.catalogue import POLICIES
from patrickstar.cluster.simulation import simulate
from patrickstar.cluster.workload import read_workload

FITTED = Path(__file__).parents[2] / "benchmarks" / "workloads"
MEANS = {
    "pollux-1x-2": {"las": 4541, "pollux": 3406, "soonest": 2533},
    "pollux-1x-6": {"las": 3398, "pollux": 2694, "soonest": 1946},
    "pollux-2x-6": {"las": 9526, "pollux": 6108, "soonest": 4970},
}
"""Mean seconds at a tick of 60 s, those that restart jobs at 30 s a resize, ours at 2 s."""


@cache
def told(workload, policy, resize_s, error=0.0):
    jobs = read_workload(FITTED / f"{workload}-fitted.csv", gpus=64, gpus_per_node=4)
    found = simulate(
        jobs, POLICIES[policy].decide, cluster=Cluster(gpus=64, resize_s=resize_s), tick_s=300.0, rest_error=error
    )
    return figures(found, policy=policy, seed=0)


@pytest.mark.parametrize("workload", MEANS)
def test_means_stay_where_they_are(workload):
    for policy, mean in MEANS[workload].items():
        assert told(workload, policy, 2.0 if policy == "soonest" else 30.0)["mean_jct"] == pytest.approx(mean, rel=0.07)


@pytest.mark.parametrize("workload", MEANS)
def test_soonest_is_better_than_pollux_without_a_longer_tail(workload):
    ours, theirs = told(workload, "soonest", 2.0), told(workload, "pollux", 30.0)
    assert ours["mean_jct"] <= 0.85 * theirs["mean_jct"]
    assert ours["p99_jct"] <= 1.06 * theirs["p99_jct"]
    assert ours["makespan"] <= 1.08 * theirs["makespan"]
    assert ours["gpu_seconds_lost"] <= 0.02 * ours["utilisation"] * 64 * ours["makespan"]


@pytest.mark.campaign
def test_an_error_in_what_remains_does_little_harm():
    assert (
        told("pollux-1x-6", "soonest", 2.0, error=1.0)["mean_jct"]
        <= 1.05 * told("pollux-1x-6", "soonest", 2.0)["mean_jct"]
    )


@pytest.mark.campaign
def test_other_policies_are_where_they_are_known_to_be():
    """Optimus as published for this workload (5302 s); ONES, whose epochs take hours here, is not better than Tiresias."""
    assert told("pollux-1x-6", "optimus", 30.0)["mean_jct"] == pytest.approx(5302, rel=0.07)
    assert told("pollux-1x-6", "ones", 2.0)["mean_jct"] > told("pollux-1x-6", "las", 30.0)["mean_jct"]
