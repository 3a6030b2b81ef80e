"""ONES: its limits, its model of progress, when a schedule is put in place, and the faults of its prototype that it has not."""

import dataclasses
import math

import numpy as np
import pytest

from patrickstar.cluster.job_view import Cluster
from patrickstar.cluster.policies.beta_model import BetaModel, digamma, features, fit, slope_by_beta
from patrickstar.cluster.policies.ones import OnesState, Seen, batch_rule, ones
from patrickstar.cluster.simulation import simulate
from tests.cluster.traces import submission, view

EIGHT = Cluster(gpus=8, gpus_per_node=4)


def rng():
    return np.random.default_rng(0)


def decide(jobs, state=None):
    return ones(jobs, EIGHT, 0.0, state, rng())


def gpus_of(allocations):
    return {name: len(one.gpu_ids) for name, one in allocations.items()}


def with_limits(limits, **seen):
    return OnesState(limits=limits, seen={name: Seen(scaled_at=at, samples=1.0) for name, at in seen.items()})


def test_new_jobs_begin_with_one_gpu_and_a_share_of_their_batch():
    found, state = decide([view("a", 4, grow=2.0), view("b", 2, grow=1.0)])
    assert gpus_of(found) == {"a": 1, "b": 1}
    assert (found["a"].batch, found["b"].batch) == (0.25, 1.0)
    assert state.limits == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("gpus", "asked", "grow", "factor"), [(1, 4, 16.0, 0.25), (4, 4, 16.0, 1.0), (32, 4, 4.0, 4.0), (2, 4, 1.0, 1.0)]
)
def test_a_batch_grows_with_the_gpus_as_far_as_it_may(gpus, asked, grow, factor):
    assert batch_rule(view(gpus=asked, grow=grow), gpus) == factor


def test_a_limit_doubles_where_a_job_runs_at_it_and_has_two_epochs_since_the_last_time():
    job = view("a", 2, epochs=4, gpu_ids=(0, 1), samples=1.0)
    assert decide([job], with_limits({"a": 2}, a=2))[1].limits == {"a": 4}
    assert decide([job], with_limits({"a": 4}, a=2))[1].limits == {"a": 4}, "it does not run at its limit"


def test_a_limit_is_never_above_the_cluster_or_the_jobs_own():
    job = view("a", 2, epochs=4, gpu_ids=tuple(range(8)), samples=1.0)
    assert decide([job], with_limits({"a": 8}, a=2))[1].limits == {"a": 8}
    job = view("a", 2, epochs=4, gpu_ids=(0, 1), samples=1.0, max_gpus=3)
    assert decide([job], with_limits({"a": 2}, a=2))[1].limits == {"a": 3}


def test_the_largest_job_is_cut_where_it_holds_half_the_cluster_for_longer_than_others(monkeypatch):
    # 2 * 4 / (300 / 100 + 1) = 2, and with the median at 200 s (300 + 100) / 2: 8 / 2.5 = 3.2, up to an even number.
    large = view("a", 4, epochs=9, gpu_ids=(0, 1, 2, 3), ran=300.0, samples=1.0)
    small = view("b", 1, epochs=9, gpu_ids=(4,), ran=100.0, samples=1.0)
    state = with_limits({"a": 8, "b": 2}, a=9, b=9)
    assert decide([large, small], state)[1].limits["a"] == 4
    assert decide([dataclasses.replace(large, gpu_ids=(0, 1, 2)), small], state)[1].limits["a"] == 8, "less than half"
    monkeypatch.setattr("patrickstar.cluster.policies.ones.SIGMA", 4.0)
    assert decide([large, dataclasses.replace(small, ran=10.0)], state)[1].limits["a"] == 2


def test_the_limit_of_a_job_that_ran_and_was_passed_over_halves_down_to_one():
    waits = view("a", 4, epochs=3, ran=50.0, samples=1.0)
    for limit, halved in ((8, 4), (1, 1)):
        state = dataclasses.replace(with_limits({"a": limit}, a=3), passed_over=frozenset({"a"}))
        assert decide([waits], state)[1].limits == {"a": halved}


def test_the_digamma_is_the_slope_of_log_gamma():
    x = np.array([1.0, 1.5, 7.0, 300.0])
    slopes = [(math.lgamma(v + 1e-5) - math.lgamma(v - 1e-5)) / 2e-5 for v in x]
    assert digamma(x) == pytest.approx(slopes, abs=1e-6)


def log_density(alpha, beta, rho):
    scale = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    return scale + (alpha - 1) * math.log(rho) + (beta - 1) * math.log(1 - rho)


def test_the_likelihood_is_of_each_line_with_itself():
    """Fault 2: pairs of all lines with all others."""
    alpha, beta, rho = np.array([2.0, 9.0, 4.0]), np.array([3.0, 1.5, 8.0]), np.array([0.2, 0.9, 0.3])
    slopes = [-(log_density(a, b + 1e-5, r) - log_density(a, b - 1e-5, r)) / 2e-5 for a, b, r in zip(alpha, beta, rho)]
    assert slope_by_beta(alpha, beta, rho) == pytest.approx(slopes, abs=1e-5)
    with pytest.raises(AssertionError):
        slope_by_beta(alpha, beta[:, None], rho)


def test_a_model_learns_how_long_jobs_take():
    """Jobs of 20 epochs, whatever their size: half way through, alpha / (alpha + beta) is about a half."""
    lines = [
        ((float(size), 1.0, float(done), done / 25, done / 25), done / 20)
        for size in range(3, 9)
        for done in range(1, 20)
    ]
    model = fit(np.array([line for line, _ in lines]), np.array([share for _, share in lines]), rng())
    beta = model.beta(np.array([[5.0, 1.0, 10.0, 0.4, 0.4], [5.0, 1.0, 18.0, 0.72, 0.72]]))
    assert 10 / (10 + beta[0]) == pytest.approx(0.5, abs=0.1)
    assert 18 / (18 + beta[1]) == pytest.approx(0.9, abs=0.1)
    assert BetaModel().beta(np.zeros((1, 5))) == 4.0


def test_what_only_needs_free_gpus_happens_at_once():
    runs = view("a", 2, epochs=5, epochs_at_change=5, gpu_ids=(0, 1), samples=50.0)
    found, _ = decide([runs, view("b", 1)], with_limits({"a": 2}, a=5))
    assert found["a"].gpu_ids == (0, 1)
    assert gpus_of(found) == {"a": 2, "b": 1}
    grown, _ = decide([runs], with_limits({"a": 4}, a=5))
    assert set(grown["a"].gpu_ids) >= {0, 1}
    assert len(grown["a"].gpu_ids) == 4


def test_all_else_waits_until_those_it_touches_have_finished_an_epoch():
    long = view("a", 8, 10_000.0, epochs=5, epochs_at_change=5, gpu_ids=tuple(range(8)), samples=100.0, ran=10.0)
    new = view("b", 1, submit=1.0)
    state = with_limits({"a": 8}, a=5)
    assert gpus_of(decide([long, new], state)[0]) == {"a": 8}
    ready = dataclasses.replace(long, epochs_at_change=4)
    assert gpus_of(decide([ready, new], state)[0]) == {"a": 7, "b": 1}


def workload():
    sizes = [1, 2, 4, 2, 3, 1, 2, 4, 1, 2]
    return [
        submission(
            f"{n}", 15.0 * n, size, 150.0 + 40 * (n % 4), noise=8.0, grow=8.0, serial=0.02, epochs=30, max_gpus=8
        )
        for n, size in enumerate(sizes)
    ]


@pytest.fixture(scope="module")
def outcome():
    return simulate(workload(), ones, cluster=EIGHT, tick_s=5.0)


def test_limits_and_population_hold_at_every_generation(outcome):
    generations = [event for event in outcome.events if event["event"] == "generation"]
    assert len(generations) > 50
    for event in generations:
        assert len(event["population"]) == len(event["scores"]) == 16
        assert event["scores"] == sorted(event["scores"])
        assert all(1 <= limit <= 8 for limit in event["limits"].values())
        for schedule in event["population"]:
            assert len(schedule) == 8
            held = {name: schedule.count(name) for name in set(schedule) - {None}}
            assert all(size <= event["limits"][name] for name, size in held.items())
    assert max(max(event["limits"].values()) for event in generations) == 8


def test_the_population_goes_on_from_one_generation_to_the_next():
    jobs = [view(f"{n}", 1, epochs=5, samples=50.0) for n in range(4)]
    limits = {job.name: 4 for job in jobs}
    _, first = decide(jobs, with_limits(limits, **dict.fromkeys(limits, 5)))
    _, second = decide(jobs, first)
    assert min(second.scores) <= min(first.scores)
    _, ended = decide(jobs[1:], second)
    assert not (ended.population == 3).any(), "a job that has ended is in no schedule"


def test_fault_1_a_model_is_asked_with_what_it_was_fitted_on():
    job = view("a", 2, epochs=2, samples=20.0, epoch_samples=1000.0, losses=(2.0, 1.0), accuracy=0.5, rest=0.1)
    _, state = decide([job])
    assert {line for line, _ in state.seen["a"].lines} == {features(job)}
    assert features(job) == (math.log(1000.0), 2.0, 2.0, 0.5, 0.5)


def test_fault_3_no_limit_is_scaled_twice_within_two_epochs():
    job = view("a", 2, epochs=4, gpu_ids=(0, 1), samples=1.0)
    _, state = decide([job], with_limits({"a": 2}, a=2))
    for epochs, limit in ((4, 4), (5, 4), (6, 8)):
        grown = dataclasses.replace(job, gpu_ids=(0, 1, 2, 3), epochs=epochs)
        _, state = decide([grown], state)
        assert state.limits == {"a": limit}


def test_faults_4_to_6_a_change_loses_neither_state_nor_data_and_nothing_is_paid_where_nothing_changes(outcome):
    """Work that is done stays done over resizes and stops in mid-epoch; a job that nobody resizes pays for its start only."""
    assert sum(job.resizes for job in outcome.jobs) > 10
    for job in outcome.jobs:
        mine = [event for event in outcome.events if event.get("job") == job.submission.name]
        speed, done = job.submission.course.at(0), 0.0
        for event, after in zip(mine, mine[1:]):
            if event["gpus"]:
                worked = max(0.0, after["t"] - event["t"] - event["hold"])
                done += worked * speed.useful_per_s(len(event["gpus"]), batch=event["batch"])
        assert done == pytest.approx(job.submission.course.work)
    (alone,) = simulate([submission(duration=100.0, epochs=1)], ones, cluster=EIGHT).jobs
    assert alone.finish == 130.0


def test_fault_7_a_resize_takes_place_when_it_is_decided_and_not_at_the_end_of_an_epoch(outcome):
    in_mid_epoch = 0
    for job in outcome.jobs:
        course, done, before = job.submission.course, 0.0, None
        for event in outcome.events:
            if event.get("job") != job.submission.name:
                continue
            if before and before["gpus"]:
                worked = max(0.0, event["t"] - before["t"] - before["hold"])
                done += worked * course.at(0).useful_per_s(len(before["gpus"]), batch=before["batch"])
                in_mid_epoch += bool(event["gpus"]) and 0.1 < done / course.epoch_samples % 1 < 0.9
            before = event
    assert in_mid_epoch > 5


def test_fault_8_what_remains_is_drawn_once_an_epoch():
    job = view("a", 2, epochs=3, samples=30.0)
    _, first = decide([job])
    other = np.random.default_rng(9)
    _, second = ones([job], EIGHT, 1.0, first, other)
    _, third = ones([dataclasses.replace(job, epochs=4)], EIGHT, 2.0, second, other)
    assert first.seen["a"].draw == second.seen["a"].draw
    assert second.seen["a"].draw != third.seen["a"].draw


def test_fault_9_a_job_that_needs_several_gpus_is_not_taken_to_run_on_fewer():
    job = view("a", 4, epochs=3, samples=30.0, min_gpus=4)
    found, state = decide([job, view("b", 1, submit=1.0)])
    assert gpus_of(found) == {"a": 4, "b": 1}
    held = [(row == 0).sum() for row in state.population]
    assert set(map(int, held)) <= {0, 4, 5, 6, 7, 8}
