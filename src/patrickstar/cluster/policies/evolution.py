"""Operators of an evolutionary search for schedules. A schedule is a job a GPU, as its number, or -1. Source: ONES (SC 2021)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from patrickstar.cluster.job_view import Numbers

Schedules: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
"""[schedules, GPUs]; counts of a job's GPUs are [schedules, jobs]."""


def capped(schedules: Schedules, limits: Schedules) -> Schedules:
    """Schedules without the entries, from the left on, that take a job over its limit. `limits`: [jobs]"""
    nth = np.tril(schedules[:, :, None] == schedules[:, None, :]).sum(axis=2)  # of its job's entries each is
    return np.where(nth > np.append(limits, 0)[schedules], -1, schedules)


def crossover(schedules: Schedules, limits: Schedules, rng: np.random.Generator) -> Schedules:
    """Children of random pairs: at every GPU a coin decides whether the two swap their entries (uniform crossover)."""
    pairs = rng.permutation(len(schedules))[: len(schedules) // 2 * 2].reshape(-1, 2)
    first, second = schedules[pairs[:, 0]], schedules[pairs[:, 1]]
    swap = rng.random(first.shape) < 0.5
    return capped(np.concatenate([np.where(swap, second, first), np.where(swap, first, second)]), limits)


def mutate(
    schedules: Schedules, young: np.ndarray[Any, np.dtype[np.bool_]], rate: float, rng: np.random.Generator
) -> Schedules:
    """Each schedule with some of its jobs thrown out completely, each at this rate; young ones stay. `young`: [jobs]"""
    out = (rng.random((len(schedules), len(young))) < rate) & ~young
    gone = np.pad(out, ((0, 0), (0, 1)))  # an empty entry, -1, finds the last column
    return np.where(np.take_along_axis(gone, schedules, axis=1), -1, schedules)


def count(schedules: Schedules, jobs: int) -> Schedules:
    """GPUs of each job in each schedule. [schedules, jobs]"""
    return np.array([np.bincount(row + 1, minlength=jobs + 1)[1:] for row in schedules])


def fill(
    counts: Schedules, passes: Sequence[tuple[Sequence[int], Schedules]], least: Schedules, gpus: int
) -> Schedules:
    """Counts after the free GPUs of each schedule have gone to jobs.

    Args:
        passes: one after another, jobs in an order and what each is filled up to; least: what each needs to run at all. [jobs] each
    """
    counts = np.where(counts < least, 0, counts)
    free = gpus - counts.sum(axis=1)
    for order, upto in passes:
        for job in order:
            more = np.clip(upto[job] - counts[:, job], 0, free)
            more = np.where(counts[:, job] + more < least[job], 0, more)
            counts[:, job] += more
            free -= more
    return counts


def reorder(counts: Schedules, present: Schedules) -> Schedules:
    """The layout of each schedule's jobs on contiguous GPUs that changes the occupant of fewest: a programme over GPUs and jobs placed.

    Jobs come in the order in which they lie now, then the others by number. Ties go to the lowest GPU.

    Args:
        counts: GPUs of each job. [schedules, jobs]; present: the job on each GPU, or -1. [GPUs]
    """
    gpus = len(present)
    # A job's GPUs among the first i. [jobs, GPUs + 1]
    same = np.pad(np.cumsum(present == np.arange(counts.shape[1])[:, None], axis=1), ((0, 0), (1, 0)))
    emptied = np.pad(np.cumsum(present >= 0), (1, 0))  # changes where the first i GPUs are left empty. [GPUs + 1]
    order = np.argsort(np.where(same[:, -1] > 0, (same > 0).argmax(axis=1), gpus + 1), kind="stable").tolist()
    found = np.full((len(counts), gpus), -1)
    for layout, sizes in zip(found, counts.tolist(), strict=True):
        least, placed = emptied.astype(float), []  # changes of the first i GPUs with the jobs that are placed
        for job in order:
            if size := sizes[job]:
                # With its last GPU before i, less what leaving those empty would change, as GPUs after it may be.
                cost = np.full(gpus + 1, np.inf)
                cost[size:] = least[:-size] + size - same[job, size:] + same[job, :-size] - emptied[size:]
                least = np.minimum.accumulate(cost) + emptied
                placed.append((job, size, cost))
        at = gpus
        for job, size, cost in reversed(placed):
            end = int(cost[: at + 1].argmin())
            at = end - size
            layout[at:end] = job
    return found


def scores(counts: Schedules, gpu_seconds: Callable[[int, int], float]) -> Numbers:
    """The sum over the jobs of each schedule of what they still take in GPU-seconds at their size. [schedules]"""
    table = np.zeros((counts.shape[1], int(counts.max(initial=0)) + 1))
    for job, sizes in enumerate(counts.T):
        for size in np.unique(sizes[sizes > 0]).tolist():
            table[job, size] = gpu_seconds(job, size)
    found: Numbers = table[np.arange(len(table)), counts].sum(axis=1)
    return found
