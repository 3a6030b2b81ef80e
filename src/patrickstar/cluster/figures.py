"""Figures of a simulation: times of jobs, what was lost, and how fair it was."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from patrickstar.cluster.job_view import Numbers
from patrickstar.cluster.simulation import DONE, Outcome, SimulatedJob
from patrickstar.cluster.workload import Course

MOST_SIZES = 128


def figures(outcome: Outcome, *, policy: str, seed: int) -> dict[str, Any]:
    """The object that `simulate --json` prints. Seconds.

    `ideal` is what a job takes alone on the cluster, at its best size and batch at every moment, without a start. `worst_ftf` is the
    largest finish-time fairness (Mahajan et al., "Themis", NSDI 2020): a job's time over that with an equal share of the cluster among
    the jobs that were there, averaged over its life. `utilisation` is the share of all GPU-seconds, from the first submission to the last
    end, that jobs held; `gpu_seconds_lost` were held without progress.
    """
    jobs, cluster = outcome.jobs, outcome.cluster
    spent = np.array([job.finish - job.submission.submit for job in jobs])
    first, last = min(job.submission.submit for job in jobs), max(job.finish for job in jobs)
    rows, fair = [], []
    for job, jct, there in zip(jobs, spent.tolist(), contention(jobs), strict=True):
        of = job.submission
        times = {"submit": of.submit, "start": job.start, "finish": job.finish, "jct": jct}
        rows.append({"job": of.name, **times, "ideal": seconds_with(of.course, of.max_gpus), "resizes": job.resizes})
        fair.append(jct / seconds_with(of.course, of.max_gpus, share=cluster.gpus / there))
    seconds = np.array(outcome.decision_seconds)
    return {
        "policy": policy,
        "gpus": cluster.gpus,
        "seed": seed,
        "jobs": rows,
        "mean_jct": float(spent.mean()),
        "p50_jct": float(np.percentile(spent, 50)),
        "p99_jct": float(np.percentile(spent, 99)),
        "makespan": last - first,
        "gpu_seconds_lost": sum(job.lost for job in jobs),
        "utilisation": sum(job.attained for job in jobs) / (cluster.gpus * (last - first)),
        "worst_ftf": max(fair),
        "decision_seconds": {"mean": float(seconds.mean()), "p99": float(np.percentile(seconds, 99))},
    }


def table(told: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Heads and a row for each policy, as texts, from the figures of each."""
    times = "mean JCT, s", "p50", "p99", "makespan, h"
    yield "policy", *times, "utilised", "GPU time lost", "worst FTF", "resizes per job"
    for one in told:
        means = (f"{one[key]:.0f}" for key in ("mean_jct", "p50_jct", "p99_jct"))
        lost = one["gpu_seconds_lost"] / (one["utilisation"] * one["gpus"] * one["makespan"])
        shares = f"{one['utilisation']:.1%}", f"{lost:.1%}", f"{one['worst_ftf']:.2f}"
        resizes = sum(job["resizes"] for job in one["jobs"]) / len(one["jobs"])
        yield one["policy"], *means, f"{one['makespan'] / 3600:.2f}", *shares, f"{resizes:.1f}"


def timeline(outcome: Outcome) -> tuple[Numbers, Numbers, Numbers]:
    """Moments, and the GPUs held and the jobs that wait from each of them on."""
    changes: defaultdict[float, list[int]] = defaultdict(lambda: [0, 0])
    for job in outcome.jobs:
        changes[job.submission.submit][1] += 1
    holds: Counter[str] = Counter()
    for event in outcome.events:
        if event["event"] == "allocate":
            change, before = changes[event["t"]], holds[event["job"]]
            holds[event["job"]] = len(event["gpus"])
            change[0] += len(event["gpus"]) - before
            change[1] += (before > 0) - bool(event["gpus"]) - (event["why"] == DONE)
    moments = np.array(sorted(changes))
    held, waiting = np.cumsum([changes[moment] for moment in moments.tolist()], axis=0).T
    return moments, held, waiting


def contention(jobs: Sequence[SimulatedJob]) -> list[float]:
    """Jobs that were there during the life of each, on average, itself included."""
    lives = np.array([(job.submission.submit, job.finish) for job in jobs])
    starts, ends = np.sort(lives, axis=0).T
    moments = np.unique(lives)
    there = np.searchsorted(starts, moments, side="right") - np.searchsorted(ends, moments, side="right")
    total = np.concatenate([[0.0], np.cumsum(there[:-1] * np.diff(moments))])
    averages: Numbers = np.diff(np.interp(lives, moments, total)) / np.diff(lives)
    return averages.ravel().clip(min=1.0).tolist()


def seconds_with(course: Course, max_gpus: int, *, share: float = math.inf) -> float:
    """Seconds of a job's whole course with a share of the cluster: so many GPUs, or a part of one, or the best number of those that it may have."""
    done = seconds = 0.0
    sizes: Sequence[int] = range(1, max_gpus + 1)
    if max_gpus > MOST_SIZES:
        sizes = np.unique(np.geomspace(1, max_gpus, MOST_SIZES).astype(int)).tolist()
    while done < course.work:
        until, rates = course.change_after(done), course.at(done).best_rates(sizes)
        # Time-slices of one GPU below one; between two sizes, the straight line; never slower for having more.
        seconds += (until - done) / float(np.interp(share, [0, *sizes], [0.0, *np.maximum.accumulate(rates)]))
        done = until
    return seconds
