"""Policies that share out GPUs by gain: each job gets what it needs at least, then always the step that gains most for a GPU."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.random import Generator

from patrickstar.cluster.gpu_ids import place
from patrickstar.cluster.job_view import Cluster, Decision, Jobs, JobView, Numbers

EXPONENT: Final = -0.5


def optimus(jobs: Jobs, cluster: Cluster, now: float, state: Any, rng: Generator) -> Decision:
    """Allocations that are best step by step for the sum of the seconds that jobs still take; batches stay as they are.

    Source: Peng et al., "Optimus" (EuroSys 2018), section 4.1, with known speeds and a known rest.
    """
    sizes = size_grid(jobs, cluster)
    order = sorted(jobs, key=lambda job: (-job.priority, job.submit))
    with np.errstate(divide="ignore"):
        left = {job.name: job.rest / job.speed.own_rates(sizes) for job in order}
    found = share_out(order, [-left[job.name] for job in order], sizes, cluster.gpus)

    def why(job: JobView, gpus: int) -> str:
        return f"{left[job.name][sizes.index(gpus)]:.0f} s left on {gpus} GPUs with its own batch"

    return place(order, found, cluster, why=why, own_batch=True), state


def pollux(jobs: Jobs, cluster: Cluster, now: float, state: Any, rng: Generator) -> Decision:
    """Allocations that maximise the harmonic mean of goodputs over those of a fair share, without knowing what remains.

    A job may get twice the GPUs it has run on at most, as nothing is known of it beyond. Where there are more jobs than GPUs, those with
    the least attained service run. Source: Qiao et al., "Pollux" (OSDI 2021), equation 11 with p = -1. What its genetic search looks for is
    found greedily here; its penalty for restarts is left out.
    """
    sizes = size_grid(jobs, cluster)
    fair = -(-cluster.gpus // len(jobs))
    order = sorted(jobs, key=lambda job: (-job.priority, job.attained, job.submit))
    values = {}
    for job in order:
        usual = job.speed.best_rates([min(fair, job.max_gpus)])[0]
        with np.errstate(divide="ignore"):
            value = -usual / job.speed.best_rates(sizes)
        value[np.asarray(sizes) > max(2 * job.largest, job.min_gpus)] = -np.inf
        values[job.name] = value
    found = share_out(order, [values[job.name] for job in order], sizes, cluster.gpus)

    def why(job: JobView, gpus: int) -> str:
        return f"{-1 / values[job.name][sizes.index(gpus)]:.2f} x the goodput of its fair share of {fair}"

    return place(order, found, cluster, why=why), state


def soonest(jobs: Jobs, cluster: Cluster, now: float, state: Any, rng: Generator) -> Decision:
    """Allocations that bring forward ends most, step by step, short jobs before long ones; where there are more jobs than GPUs, the shortest run.

    A greedy on the sum of (expected seconds to the end)^(-1/2), the seconds that a change costs included. The root lies between shortest
    remaining time first, which would let long jobs wait, and equal speedups, which would let short ones.
    """
    sizes = size_grid(jobs, cluster)
    left = {job.name: seconds_left(job, sizes, cluster) for job in jobs}
    order = sorted(jobs, key=lambda job: (-job.priority, left[job.name].min(), job.submit))
    values = [np.where(left[job.name] < np.inf, left[job.name] ** EXPONENT, -np.inf) for job in order]
    found = share_out(order, values, sizes, cluster.gpus)

    def why(job: JobView, gpus: int) -> str:
        ends = left[job.name][sizes.index(gpus)]
        if job.gpu_ids and gpus != len(job.gpu_ids):
            before = left[job.name][sizes.index(len(job.gpu_ids))]
            return f"ends in {ends:.0f} s on {gpus} GPUs, in {before:.0f} s on the {len(job.gpu_ids)} that it has"
        return f"ends in {ends:.0f} s on {gpus} GPUs"

    return place(order, found, cluster, why=why), state


def seconds_left(job: JobView, sizes: Sequence[int], cluster: Cluster) -> Numbers:
    """Seconds until a job ends at each of these sizes, with those that getting there costs; infinite where it cannot run."""
    with np.errstate(divide="ignore"):
        left = job.rest / job.speed.best_rates(sizes)
    cost = cluster.resize_s if job.gpu_ids else cluster.start_s
    return left + np.where(np.asarray(sizes) == len(job.gpu_ids), 0.0, cost)


def size_grid(jobs: Sequence[JobView], cluster: Cluster) -> tuple[int, ...]:
    """Sizes worth a look, ascending: all up to 64, above that about a tenth apart, and those that jobs have, need or may have."""
    grid = {round(64 * 1.1**step) for step in range(80)} | set(range(1, 65)) | {cluster.gpus}
    grid |= {size for job in jobs for size in (job.min_gpus, job.asked, len(job.gpu_ids))}
    grid |= {min(job.max_gpus, cluster.gpus) for job in jobs}
    return tuple(sorted(size for size in grid if 1 <= size <= cluster.gpus))


def share_out(jobs: Sequence[JobView], values: Sequence[Numbers], sizes: Sequence[int], gpus: int) -> dict[str, int]:
    """Sizes by job, 0 left out.

    Jobs get the least size that they can have in the order given, those that do not fit are passed over; what is left goes step by step to
    the job whose value grows most for a GPU, over as many GPUs at once as make that most (a plateau is stepped over).

    Args:
        values: of each job at each of `sizes`; minus infinity where it cannot run. The larger, the better.
    """
    grid = np.asarray(sizes)
    found: dict[str, int] = {job.name: len(job.gpu_ids) for job in jobs if job.pinned and job.gpu_ids}
    free = gpus - sum(found.values())
    at: dict[int, int] = {}
    ends: dict[int, int] = {}
    for number, (job, value) in enumerate(zip(jobs, values, strict=True)):
        able = np.flatnonzero((grid >= job.min_gpus) & (grid <= job.max_gpus) & (value > -np.inf)).tolist()
        if job.name not in found and able and sizes[able[0]] <= free:
            at[number], ends[number] = able[0], able[-1] + 1
            free -= sizes[able[0]]

    def step(number: int) -> tuple[float, int, int] | None:
        """The negative of the best gain for a GPU, the job, and where it leads."""
        here, value = at[number], values[number]
        last = min(ends[number], int(np.searchsorted(grid, grid[here] + free, side="right")))
        if last <= here + 1:
            return None
        gains = (value[here + 1 : last] - value[here]) / (grid[here + 1 : last] - grid[here])
        best = int(gains.argmax())
        return (-float(gains[best]), number, here + 1 + best) if gains[best] > 0 else None

    heap = [found_step for number in at if (found_step := step(number))]
    heapq.heapify(heap)
    while heap and free:
        _, number, there = heapq.heappop(heap)
        more = sizes[there] - sizes[at[number]]
        if more <= free:
            at[number], free = there, free - more
        # A step that no longer fits is looked for anew, among those that do.
        if following := step(number):
            heapq.heappush(heap, following)
    return found | {jobs[number].name: sizes[place] for number, place in at.items()}
