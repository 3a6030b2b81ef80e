"""The simulation against an oracle, and what must hold under every policy."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.cluster.figures import contention, figures, seconds_with
from patrickstar.cluster.job_view import Allocation, Cluster, PolicyError
from patrickstar.cluster.policies.catalogue import POLICIES
from patrickstar.cluster.policies.greedy import soonest
from patrickstar.cluster.policies.rigid import fifo, srtf
from patrickstar.cluster.simulation import PATIENCE, in_order_of_giving, simulate
from tests.cluster import oracle
from tests.cluster.traces import submission, workloads

SMALL = Cluster(gpus=8, gpus_per_node=4, start_s=30.0, resize_s=2.0)
rows = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 8), st.integers(1, 900)), min_size=1, max_size=15)


def jobs_of(rows):
    return tuple(submission(f"{number}", *row) for number, row in enumerate(rows))


def ends(outcome):
    return [job.finish for job in outcome.jobs]


@given(rows.map(sorted), st.sampled_from([0.0, 30.0]))
@settings(max_examples=30)
def test_fifo_ends_jobs_when_the_oracle_does(rows, start_s):
    found = simulate(jobs_of(rows), fifo, cluster=dataclasses.replace(SMALL, start_s=start_s), tick_s=300.0)
    assert ends(found) == pytest.approx(oracle.fifo(rows, gpus=8, start_s=start_s))


@given(rows.map(sorted), st.sampled_from([0.0, 30.0]))
@settings(max_examples=30)
def test_srtf_on_one_gpu_ends_jobs_when_the_oracle_does(rows, start_s):
    rows = [(submit, 1, seconds) for submit, _, seconds in rows]
    found = simulate(jobs_of(rows), srtf, cluster=Cluster(gpus=1, gpus_per_node=1, start_s=start_s))
    assert ends(found) == pytest.approx(oracle.srtf_on_one(rows, start_s=start_s))


def test_the_oracle_of_srtf_is_not_that_of_fifo():
    rows = [(0, 1, 100), (10, 1, 5)]
    assert oracle.srtf_on_one(rows, start_s=1.0) == [108.0, 16.0]
    assert oracle.fifo(rows, gpus=1, start_s=1.0) == [101.0, 107.0]


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
@settings(max_examples=12)
def test_every_policy_conserves_gpus_and_work(name, data):
    check_conservation(name, data.draw(workloads(gpus=8)))


@pytest.mark.campaign
@pytest.mark.parametrize("name", POLICIES)
@given(workload=workloads(gpus=8))
@settings(max_examples=200)
def test_every_policy_conserves_gpus_and_work_on_200_workloads(name, workload):
    check_conservation(name, workload)


def check_conservation(name, workload):
    """Replays the events: no GPU twice at any moment, work adds up to the whole, nobody is faster than alone."""
    policy = POLICIES[name]
    found = simulate(workload, policy.decide, cluster=SMALL, tick_s=300.0)
    jobs = {job.name: job for job in workload}
    holder, at, held_until, done = {}, {}, {}, dict.fromkeys(jobs, 0.0)
    events = [event for event in found.events if event["event"] == "allocate"]
    assert [event["t"] for event in events] == sorted(event["t"] for event in events)
    for event in events:
        name_of, t = event["job"], event["t"]
        if name_of in at:
            before = at[name_of]
            speed = jobs[name_of].course.at(0)
            if before["gpus"]:
                worked = max(0.0, t - max(before["t"], held_until[name_of]))
                done[name_of] += worked * speed.useful_per_s(len(before["gpus"]), batch=before["batch"])
                for gpu in before["gpus"]:
                    assert holder.pop(gpu) == name_of
        assert not set(event["gpus"]) & set(holder), "a GPU is given out before it is given back"
        holder |= dict.fromkeys(event["gpus"], name_of)
        assert event["why"]
        if event["gpus"]:
            assert jobs[name_of].min_gpus <= len(event["gpus"]) <= jobs[name_of].max_gpus
            assert policy.resizes or (len(event["gpus"]), event["batch"]) == (jobs[name_of].gpus, 1.0)
        at[name_of], held_until[name_of] = event, t + event["hold"]
    assert holder == {}
    for job, told in zip(found.jobs, figures(found, policy=name, seed=0)["jobs"], strict=True):
        assert done[job.submission.name] == pytest.approx(job.submission.course.work)
        assert told["jct"] >= told["ideal"] * (1 - 1e-9)
        assert job.submission.submit <= job.start < job.finish


@pytest.mark.parametrize("name", POLICIES)
def test_one_seed_gives_one_outcome(name):
    jobs = tuple(submission(f"{n}", 37.0 * n, 1 + n % 5, 200.0 + 90 * (n % 7), noise=2.0, grow=4.0) for n in range(20))
    first, second = (simulate(jobs, POLICIES[name].decide, cluster=SMALL, seed=3) for _ in range(2))
    assert first.events == second.events
    assert ends(first) == ends(second)


def test_a_start_and_a_resize_hold_gpus_without_progress():
    def grows(jobs, cluster, now, state, rng):
        return {"a": Allocation((0,) if now < 60 else (0, 1), 1.0, "grows")}, None

    found = simulate([submission(duration=100.0, serial=0.0)], grows, cluster=SMALL)
    # 30 s to start, 30 s of work, 2 s to resize, and 70 s of work at twice the speed.
    assert ends(found) == [97.0]
    assert (found.jobs[0].lost, found.jobs[0].attained, found.jobs[0].resizes) == (30.0 + 2 * 2.0, 60.0 + 2 * 37.0, 1)


def test_time_goes_on_where_a_tick_is_no_binary_fraction():
    assert 3 * 177.7 // 177.7 == 2
    assert ends(simulate([submission(duration=1000.0)], fifo, cluster=SMALL, tick_s=177.7)) == [1030.0]


def test_a_start_is_not_cut_short_by_a_resize():
    def grows(jobs, cluster, now, state, rng):
        return {"a": Allocation((0,) if now < 10 else (0, 1), 1.0, "grows")}, None

    found = simulate([submission(duration=100.0, serial=0.0)], grows, cluster=SMALL, tick_s=10.0)
    assert ends(found) == [80.0]


def test_a_stop_in_the_middle_of_an_epoch_loses_no_work():
    def pauses(jobs, cluster, now, state, rng):
        return ({} if now == 60 else {"a": Allocation((0,), 1.0, "on")}), None

    found = simulate([submission(duration=1000.0, epochs=1)], pauses, cluster=SMALL)
    assert ends(found) == [1000.0 + 30 + 60 + 30]


def test_gpus_are_given_back_before_they_are_given_out():
    order = in_order_of_giving({"a": (1, 2), "b": (3,)}, {"a": (0,), "b": (2, 3)})
    assert order == [("b", (3,)), ("a", (1, 2))]
    order = in_order_of_giving({"a": (1,), "b": (0,)}, {"a": (0,), "b": (1,)})
    assert order == [("a", ()), ("b", (0,)), ("a", (1,))]


@pytest.mark.parametrize(
    ("gives", "says"),
    [
        ({"a": (0, 0)}, "GPU 0 to 'a' and to 'a'"),
        ({"a": (0,), "b": (0,)}, "GPU 0 to 'a' and to 'b'"),
        ({"a": (8,)}, "GPU 8 to 'a'; there are 0 to 7"),
        ({"c": (1,)}, "'c', which is not there"),
        ({"b": (1, 2, 3)}, "3 GPUs to 'b', which takes 1 to 2"),
    ],
)
def test_a_decision_that_cannot_be_carried_out_is_named(gives, says):
    def policy(jobs, cluster, now, state, rng):
        return {name: Allocation(gpus, 1.0, "") for name, gpus in gives.items()}, None

    with pytest.raises(PolicyError, match="decision 1 of policy policy, at 5 s: ") as error:
        simulate([submission("a", 5.0), submission("b", 5.0, max_gpus=2)], policy, cluster=SMALL)
    assert says in str(error.value)


def test_a_policy_that_raises_is_named():
    def fails(jobs, cluster, now, state, rng):
        return {"a": Allocation((0,), 1.0, "on")} if now < 60 else jobs[7], None

    with pytest.raises(PolicyError, match="decision 2 of policy fails, at 60 s: it raised IndexError"):
        simulate([submission()], fails, cluster=SMALL)


def test_a_batch_out_of_bounds_is_named():
    with pytest.raises(PolicyError, match="'a' 2 times its batch, which may be 1 to 1"):
        simulate([submission()], lambda *_: ({"a": Allocation((0,), 2.0, "")}, None), cluster=SMALL)


def test_a_policy_that_gives_nothing_for_ever_is_stopped():
    with pytest.raises(PolicyError, match=f"{PATIENCE} decisions in a row gave nothing to 1 jobs"):
        simulate([submission()], lambda *_: ({}, None), cluster=SMALL)


def test_what_remains_is_told_with_an_error_where_one_is_asked_for():
    told = []

    def listens(jobs, cluster, now, state, rng):
        told.append(jobs[0].rest)
        return {"a": Allocation((0,), 1.0, "")}, None

    for error in (0.0, 1.0):
        simulate([submission()], listens, cluster=SMALL, rest_error=error)
    assert told[0] == 100.0
    assert told[0] not in told[len(told) // 2 :]


def test_contention_is_the_average_over_a_life():
    found = simulate([submission("a", 0.0, 8, 100.0), submission("b", 50.0, 8, 100.0)], fifo, cluster=SMALL)
    # a: 130 s, alone for 50 of them; b: from 50 to 260.
    assert contention(found.jobs) == pytest.approx([(50 + 2 * 80) / 130, (2 * 80 + 130) / 210])


def test_a_share_below_one_gpu_is_a_share_of_its_time():
    course = submission(duration=100.0, gpus=1).course
    assert seconds_with(course, 8, share=0.5) == pytest.approx(200.0)
    assert seconds_with(course, 8, share=1.0) == pytest.approx(100.0)
    assert seconds_with(course, 8) == seconds_with(course, 8, share=8.0) < seconds_with(course, 8, share=4.5)


def test_figures_are_those_of_the_jobs():
    jobs = (submission("a", 10.0, 4, 100.0), submission("b", 20.0, 8, 50.0))
    found = figures(simulate(jobs, fifo, cluster=SMALL), policy="fifo", seed=0)
    assert [job["jct"] for job in found["jobs"]] == [130.0, 200.0]
    assert (found["mean_jct"], found["p50_jct"], found["makespan"]) == (165.0, 165.0, 210.0)
    assert found["gpu_seconds_lost"] == 30.0 * (4 + 8)
    assert found["utilisation"] == pytest.approx((130 * 4 + 80 * 8) / (8 * 210))
    assert math.isfinite(found["worst_ftf"])


def test_soonest_beats_fifo_where_short_jobs_wait_behind_long_ones():
    jobs = [submission(f"{n}", float(n), 8, seconds) for n, seconds in enumerate(itertools.chain([5000.0], [60.0] * 6))]
    means = [
        figures(simulate(jobs, policy, cluster=SMALL), policy="", seed=0)["mean_jct"] for policy in (soonest, fifo)
    ]
    assert means[0] < 0.5 * means[1]
