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
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from patrickstar.cluster.job_view import Allocation, Allocations, Cluster, JobView
from patrickstar.cluster.policies.beta_model import BetaModel, features, fit
from patrickstar.cluster.policies.evolution import (
    Schedules,
    capped,
    count,
    crossover,
    fill,
    mutate,
    reorder,
    scores,
)

YOUNG = 2
"""Epochs before a job is predicted, mutated or scaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnesOptions:
    """Constants of the search, as the prototype has them."""

    population: int = 16
    mutation: float = 0.3
    most_of_asked: int = 4
    """A job gets so many times the GPUs asked for before all others have had theirs."""
    interval: int = 1
    """Epochs that a running job must finish between two changes of its GPUs."""
    sigma: float = 1.0
    redraw: bool = False
    """The prototype's habit of a new draw of every job's progress at each decision, under which jobs change places all the time."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A job's history: lines of its log with the samples done at each, its draw of progress and the epochs when it was drawn."""

    lines: tuple[tuple[tuple[float, ...], float], ...] = ()
    samples: float = 0.0
    draw: float = 0.5
    drawn_at: int = -1
    scaled_at: int = 0


@dataclass(frozen=True, slots=True)
class OnesState:
    """A population between two decisions, and what has been learned. Limits by job; scores ascending."""

    names: tuple[str, ...] = ()
    population: Schedules = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    scores: tuple[float, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    seen: Mapping[str, Seen] = field(default_factory=dict)
    log: tuple[tuple[tuple[float, ...], float], ...] = ()
    """Lines of jobs that have ended, with the progress that they turned out to be."""
    model: BetaModel = field(default_factory=BetaModel)
    passed_over: frozenset[str] = frozenset()
    """Jobs that had run, and that the last schedule put in place had no GPU for."""

    def event(self) -> dict[str, Any]:
        named = np.array([*self.names, None], dtype=object)[self.population].tolist()
        return {"population": named, "scores": list(self.scores), "limits": dict(self.limits)}


def ones(
    jobs: Sequence[JobView],
    cluster: Cluster,
    now: float,  # noqa: ARG001 - a policy's
    state: OnesState | None,
    rng: np.random.Generator,
    *,
    options: OnesOptions = OnesOptions(),
) -> tuple[Allocations, OnesState]:
    """Allocations by one generation of the search, and the population that goes on to the next."""
    state = state or OnesState()
    log, model = _learn(jobs, state, rng)
    seen = {job.name: _look(job, state.seen.get(job.name, Seen()), model, options, rng) for job in jobs}
    limits, seen = _set_limits(jobs, state, seen, cluster, options)
    rest = [seen[job.name].draw for job in jobs]
    rest = [job.samples * (1 / rho - 1) for job, rho in zip(jobs, rest, strict=True)]
    population, found = _generation(jobs, cluster, state, limits, rest, options, rng)
    allocations, passed_over = _put_in_place(jobs, population[0], rest, options)
    names = tuple(job.name for job in jobs)
    by_name = dict(zip(names, limits.tolist(), strict=True))
    return allocations, OnesState(names, population, tuple(found.tolist()), by_name, seen, log, model, passed_over)


def batch_rule(job: JobView, gpus: int) -> float:
    """The factor of its own batch on so many GPUs: each has what it had, as long as the job's batch may grow.

    The learning rate follows the batch linearly, moved from the old to the new one during an epoch, by whoever runs the job.
    """
    least, most = job.speed.batches()
    return min(max(gpus / job.gpus, least), most)


def _learn(jobs: Sequence[JobView], state: OnesState, rng: np.random.Generator) -> tuple[tuple[Any, ...], BetaModel]:
    """The log with the lines of jobs that have ended since, and a model fitted to it where there are such."""
    ended = [state.seen[name] for name in sorted(state.seen.keys() - {job.name for job in jobs})]
    new = [(line, min(done / one.samples, 0.999)) for one in ended for line, done in one.lines if done > 0]
    if not new:
        return state.log, state.model
    log = (*state.log, *new)
    return log, fit(np.array([line for line, _ in log]), np.array([share for _, share in log]), rng)


def _look(job: JobView, seen: Seen, model: BetaModel, options: OnesOptions, rng: np.random.Generator) -> Seen:
    """A job's history with what it has done since."""
    line = features(job)
    lines = (
        seen.lines
        if job.epochs <= len(seen.lines)
        else (*seen.lines, *[(line, job.samples)] * (job.epochs - len(seen.lines)))
    )
    draw, drawn_at = seen.draw, seen.drawn_at
    if job.epochs >= YOUNG and (drawn_at != job.epochs or options.redraw):
        beta = model.beta(np.array([line]))[0]
        draw, drawn_at = float(np.clip(rng.beta(job.epochs, beta), 1e-3, 1 - 1e-6)), job.epochs
    return Seen(lines, job.samples, draw, drawn_at, seen.scaled_at)


def _set_limits(
    jobs: Sequence[JobView], state: OnesState, seen: dict[str, Seen], cluster: Cluster, options: OnesOptions
) -> tuple[Schedules, dict[str, Seen]]:
    """Limits doubled, cut and halved. [jobs]"""
    running = [job for job in jobs if job.gpu_ids]
    largest = max(running, key=lambda job: len(job.gpu_ids), default=None)
    usual = statistics.median(job.ran for job in running) if running else 0.0
    limits, seen = [], dict(seen)
    for job in jobs:
        limit, held = state.limits.get(job.name, job.min_gpus), len(job.gpu_ids)
        if held and held == limit and job.epochs - seen[job.name].scaled_at >= YOUNG:
            limit = min(2 * limit, cluster.gpus, job.max_gpus)
            before = seen[job.name]
            seen[job.name] = Seen(before.lines, before.samples, before.draw, before.drawn_at, job.epochs)
        if job is largest and 2 * held >= cluster.gpus and job.ran > usual > 0:
            limit = min(limit, math.ceil(held / (options.sigma * job.ran / usual + 1)) * 2)
        if job.name in state.passed_over and not held:
            limit //= 2
        limits.append(held if job.pinned and held else max(limit, job.min_gpus))
    return np.array(limits), seen


def _generation(  # noqa: PLR0917 - the steps of one generation
    jobs: Sequence[JobView],
    cluster: Cluster,
    state: OnesState,
    limits: Schedules,
    rest: Sequence[float],
    options: OnesOptions,
    rng: np.random.Generator,
) -> tuple[Schedules, Any]:
    """The population after one generation, best first, and its scores."""
    numbers = {job.name: number for number, job in enumerate(jobs)}
    if len(state.population):
        known = np.array([*(numbers.get(name, -1) for name in state.names), -1])[state.population]
    else:
        known = np.full((options.population, cluster.gpus), -1)
        for row in known:
            drawn = rng.permutation(len(jobs))[: cluster.gpus]
            row[: len(drawn)] = drawn
    young = np.array([job.epochs < YOUNG for job in jobs])
    kept = capped(known, limits)
    candidates = np.concatenate([kept, crossover(kept, limits, rng), mutate(kept, young, options.mutation, rng)])
    least = np.array([job.min_gpus for job in jobs])
    alone = [
        left / job.speed.samples_per_s(job.min_gpus, batch=batch_rule(job, job.min_gpus))
        for job, left in zip(jobs, rest, strict=True)
    ]
    new = [number for number, job in enumerate(jobs) if young[number]]
    shortest = sorted(
        (number for number in numbers.values() if not young[number]), key=lambda number: (alone[number], number)
    )
    asked = np.minimum(limits, [options.most_of_asked * job.asked for job in jobs])
    counts = fill(
        count(candidates, len(jobs)), [(new, least), (shortest, asked), (shortest, limits)], least, cluster.gpus
    )

    def gpu_seconds(number: int, size: int) -> float:
        if young[number]:
            return 0.0
        return rest[number] * size / jobs[number].speed.samples_per_s(size, batch=batch_rule(jobs[number], size))

    found = scores(counts, gpu_seconds)
    best = np.argsort(found, kind="stable")[: options.population]
    present = np.full(cluster.gpus, -1)
    for number, job in enumerate(jobs):
        present[list(job.gpu_ids)] = number
    # Scores do not depend on where a job's GPUs are: only those that stay are laid out.
    return reorder(counts[best], present), found[best]


def _put_in_place(
    jobs: Sequence[JobView], schedule: Schedules, rest: Sequence[float], options: OnesOptions
) -> tuple[dict[str, Allocation], frozenset[str]]:
    """Allocations of the best schedule, or of as much of it as may be put in place now; who has run and got nothing by it.

    A change that needs free GPUs only is made at once. Any other waits until all running jobs that it touches, and those that these wait
    for, have finished an epoch since their GPUs were last changed.
    """
    wanted = {job.name: tuple(np.flatnonzero(schedule == number).tolist()) for number, job in enumerate(jobs)}
    chosen = frozenset(name for name, gpus in wanted.items() if gpus)
    busy = {gpu for job in jobs for gpu in job.gpu_ids}
    waits = {
        job.name
        for job in jobs
        if job.gpu_ids
        and (job.epochs - job.epochs_at_change < options.interval or job.pinned)
        and not (
            set(job.gpu_ids) <= set(wanted[job.name]) and busy.isdisjoint(set(wanted[job.name]) - set(job.gpu_ids))
        )
    }
    while waits:
        stay = {gpu for job in jobs if job.name in waits for gpu in job.gpu_ids}
        wanted |= {job.name: job.gpu_ids for job in jobs if job.name in waits}
        more = {job.name for job in jobs if job.name not in waits and not stay.isdisjoint(wanted[job.name])}
        waits = waits | more if more else set()
    changes = any(wanted[job.name] != job.gpu_ids for job in jobs)
    passed_over = frozenset(
        job.name for job in jobs if changes and job.ran and not job.gpu_ids and job.name not in chosen
    )
    found = {}
    for number, job in enumerate(jobs):
        if gpu_ids := wanted[job.name]:
            what = f"about {rest[number]:.0f} samples left" if job.epochs >= YOUNG else "new"
            found[job.name] = Allocation(
                gpu_ids, batch_rule(job, len(gpu_ids)), f"{what}, of the schedule with the least GPU time left"
            )
    return found, passed_over
