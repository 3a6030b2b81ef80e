"""ONES: a population of schedules that evolves with the cluster, towards the least remaining GPU time.

Source: Bian et al., "Online Evolutionary Batch Size Orchestration for Scheduling Deep Learning Workloads in GPU Clusters" (SC 2021,
arXiv:2108.03645), in the details that the paper leaves open as its authors' prototype does it, without that prototype's faults: a
predictor asked with what it was fitted on, a likelihood of lines and not of pairs, two epochs between any two scalings of a limit, one
draw an epoch in place of one a second, speeds that are not taken through (0, 0).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.random import Generator

from patrickstar.cluster.job_view import Allocation, Cluster, Decision, Ids, Jobs, JobView
from patrickstar.cluster.policies.beta_model import BetaModel, features, fit
from patrickstar.cluster.policies.evolution import Schedules, capped, count, crossover, fill, mutate, reorder, scores

# As the prototype has them.
POPULATION, MUTATION, SIGMA = 16, 0.3, 1.0
YOUNG = 2
"""Epochs before a job is predicted, mutated or scaled."""
MOST_OF_ASKED = 4
"""A job gets so many times the GPUs asked for before all others have had theirs."""

Line: TypeAlias = tuple[tuple[float, ...], float]
"""Features of a job, and the samples that it had then done or the progress that these turned out to be."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A job's history: a line an epoch, its samples, its draw of progress, and the epochs when its limit was scaled."""

    lines: tuple[Line, ...] = ()
    samples: float = 0.0
    draw: float = 0.5
    scaled_at: int = 0


@dataclass(frozen=True, slots=True)
class OnesState:
    """A population between two decisions, and what has been learned. Scores ascending; `log` is of jobs that have ended."""

    population: Schedules = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    scores: tuple[float, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    """By job, in the order of the numbers that jobs have in the population."""
    seen: Mapping[str, Seen] = field(default_factory=dict)
    log: tuple[Line, ...] = ()
    model: BetaModel = field(default_factory=BetaModel)
    passed_over: frozenset[str] = frozenset()
    """Jobs that had run, and that the last schedule put in place had no GPU for."""

    def event(self) -> dict[str, Any]:
        named = np.array([*self.limits, None], dtype=object)[self.population].tolist()
        return {"population": named, "scores": list(self.scores), "limits": dict(self.limits)}


def ones(jobs: Jobs, cluster: Cluster, now: float, state: Any, rng: Generator) -> Decision:
    """Allocations by one generation of the search, and the population that goes on to the next."""
    state = state or OnesState()
    log, model = _learn(jobs, state, rng)
    seen = {job.name: _look(job, state.seen.get(job.name, Seen()), model, rng) for job in jobs}
    limits, seen = _limits(jobs, state, seen, cluster)
    bounds, young = np.array([*limits.values()]), np.array([job.epochs < YOUNG for job in jobs])
    kept = capped(_carried_over([*limits], cluster, state, rng), bounds)
    candidates = np.concatenate([kept, crossover(kept, bounds, rng), mutate(kept, young, MUTATION, rng)])
    rest = [job.samples * (1 / seen[job.name].draw - 1) for job in jobs]

    def gpu_seconds(number: int, size: int) -> float:
        speed = jobs[number].speed.samples_per_s(size, batch=batch_rule(jobs[number], size))
        return 0.0 if young[number] else rest[number] * size / speed

    least = np.array([job.min_gpus for job in jobs])
    alone = [gpu_seconds(number, job.min_gpus) / job.min_gpus for number, job in enumerate(jobs)]
    shortest = sorted(np.flatnonzero(~young).tolist(), key=lambda number: (alone[number], number))
    asked = np.minimum(bounds, [MOST_OF_ASKED * job.asked for job in jobs])
    passes = [(np.flatnonzero(young).tolist(), least), (shortest, asked), (shortest, bounds)]
    counts = fill(count(candidates, len(jobs)), passes, least, cluster.gpus)
    found = scores(counts, gpu_seconds)
    best = np.argsort(found, kind="stable")[:POPULATION]
    present = np.full(cluster.gpus, -1)
    for number, job in enumerate(jobs):
        present[list(job.gpu_ids)] = number
    # Scores do not depend on where a job's GPUs are: only those that stay are laid out.
    population = reorder(counts[best], present)
    chosen = {name: tuple(np.flatnonzero(population[0] == number).tolist()) for number, name in enumerate(limits)}
    wanted = _ready(jobs, chosen)
    changes = any(wanted[job.name] != job.gpu_ids for job in jobs)
    waits = [job.name for job in jobs if changes and job.ran and not job.gpu_ids and not chosen[job.name]]
    allocations = {}
    for number, job in enumerate(jobs):
        if gpus := wanted[job.name]:
            left = "new" if young[number] else f"about {rest[number]:.0f} samples left"
            why = f"{left}; of the schedule with the least GPU time left"
            allocations[job.name] = Allocation(gpus, batch_rule(job, len(gpus)), why)
    ascending = tuple(found[best].tolist())
    return allocations, OnesState(population, ascending, limits, seen, log, model, frozenset(waits))


def batch_rule(job: JobView, gpus: int) -> float:
    """The factor of its own batch on so many GPUs: each has what it had, as long as the job's batch may grow.

    The learning rate follows the batch linearly, moved from the old to the new one during an epoch, by whoever runs the job.
    """
    least, most = job.speed.batches()
    return min(max(gpus / job.gpus, least), most)


def _learn(jobs: Jobs, state: OnesState, rng: Generator) -> tuple[tuple[Line, ...], BetaModel]:
    """The log with the lines of jobs that have ended since, and a model fitted to it where there are such."""
    ended = [state.seen[name] for name in sorted(state.seen.keys() - {job.name for job in jobs})]
    new = [(line, min(done / one.samples, 0.999)) for one in ended for line, done in one.lines if done > 0]
    if not new:
        return state.log, state.model
    log = (*state.log, *new)
    return log, fit(np.array([line for line, _ in log]), np.array([share for _, share in log]), rng)


def _look(job: JobView, seen: Seen, model: BetaModel, rng: Generator) -> Seen:
    """A job's history with what it has done since."""
    line = features(job)
    new = [(line, job.samples)] * (job.epochs - len(seen.lines))
    seen = replace(seen, lines=(*seen.lines, *new), samples=job.samples)
    if job.epochs >= YOUNG and new:
        drawn = rng.beta(job.epochs, model.beta(np.array([line]))[0])
        seen = replace(seen, draw=float(np.clip(drawn, 1e-3, 1 - 1e-6)))
    return seen


def _limits(
    jobs: Jobs, state: OnesState, seen: Mapping[str, Seen], cluster: Cluster
) -> tuple[dict[str, int], dict[str, Seen]]:
    """Limits doubled, cut and halved, and histories with when they were scaled."""
    running = [job for job in jobs if job.gpu_ids]
    largest = max(running, key=lambda job: len(job.gpu_ids), default=None)
    usual = statistics.median(job.ran for job in running) if running else 0.0
    limits, seen = {}, dict(seen)
    for job in jobs:
        limit, held = state.limits.get(job.name, job.min_gpus), len(job.gpu_ids)
        if held and held == limit and job.epochs - seen[job.name].scaled_at >= YOUNG:
            limit = min(2 * limit, cluster.gpus, job.max_gpus)
            seen[job.name] = replace(seen[job.name], scaled_at=job.epochs)
        if job is largest and 2 * held >= cluster.gpus and job.ran > usual > 0:
            limit = min(limit, math.ceil(held / (SIGMA * job.ran / usual + 1)) * 2)
        if job.name in state.passed_over and not held:
            limit //= 2
        limits[job.name] = held if job.pinned and held else max(limit, job.min_gpus)
    return limits, seen


def _carried_over(names: Sequence[str], cluster: Cluster, state: OnesState, rng: Generator) -> Schedules:
    """The last population without jobs that have ended; at first, jobs in random orders with a GPU each."""
    if len(state.population):
        numbers = {name: number for number, name in enumerate(names)}
        return np.array([*(numbers.get(name, -1) for name in state.limits), -1])[state.population]
    drawn = np.full((POPULATION, max(cluster.gpus, len(names))), -1)
    drawn[:, : len(names)] = [rng.permutation(len(names)) for _ in drawn]
    return drawn[:, : cluster.gpus]


def _ready(jobs: Jobs, chosen: Mapping[str, Ids]) -> dict[str, Ids]:
    """GPUs by job of as much of a schedule as may be put in place now.

    A change that needs free GPUs only is made at once. Any other waits until all running jobs that it touches, and those that these wait
    for, have finished an epoch since their GPUs were last changed.
    """
    wanted, busy = dict(chosen), {gpu for job in jobs for gpu in job.gpu_ids}
    waits = set()
    for job in jobs:
        held, new = set(job.gpu_ids), set(wanted[job.name])
        if held and (job.pinned or job.epochs <= job.epochs_at_change):
            waits |= set() if held <= new and busy.isdisjoint(new - held) else {job.name}
    more = waits
    while more:
        stay = {gpu for job in jobs if job.name in waits for gpu in job.gpu_ids}
        wanted |= {job.name: job.gpu_ids for job in jobs if job.name in waits}
        more = {job.name for job in jobs if job.name not in waits and not stay.isdisjoint(wanted[job.name])}
        waits |= more
    return wanted
