"""Rigid policies: every job the GPUs asked for and its own batch, in an order, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from numpy.random import Generator

from patrickstar.cluster.gpu_ids import place
from patrickstar.cluster.job_view import Allocation, Cluster, Decision, Jobs, JobView

THRESHOLD_GPU_S: Final = 16 * 3600.0


def fifo(jobs: Jobs, cluster: Cluster, now: float, state: Any, rng: Generator) -> Decision:
    """Allocations in order of submission, higher priorities first, until the first that does not fit: nobody overtakes it."""
    order = sorted(jobs, key=lambda job: (not job.gpu_ids, -job.priority, job.submit))
    return in_order(order, cluster, why=lambda job: f"submitted at {job.submit:g} s, as asked", waits=True), state


def srtf(jobs: Jobs, cluster: Cluster, now: float, state: Any, rng: Generator) -> Decision:
    """Allocations in order of the seconds of work left on the GPUs asked for; what does not fit is passed over, and what runs may be stopped."""
    left = {job.name: job.rest / job.speed.own_rates([job.asked]).item() for job in jobs}
    order = sorted(jobs, key=lambda job: (-job.priority, left[job.name], job.submit))
    return in_order(order, cluster, why=lambda job: f"{left[job.name]:.0f} s left, shorter ones first"), state


def las(jobs: Jobs, cluster: Cluster, now: float, state: Any, rng: Generator) -> Decision:
    """Allocations to jobs below the threshold in order of submission, then to the others in the order in which they passed it.

    `state` is that order: names. Source: Gu et al., "Tiresias" (NSDI 2019), discretized two-dimensional LAS, without knowledge of what remains; the
    threshold is that of the Pollux artifact's baseline.
    """
    before = () if state is None else state
    passed = [job.name for job in jobs if job.attained >= THRESHOLD_GPU_S]
    late = tuple(name for name in before if name in passed) + tuple(name for name in passed if name not in before)
    rank = {name: place for place, name in enumerate(late, start=1)}
    order = sorted(jobs, key=lambda job: (-job.priority, rank.get(job.name, 0), job.submit))

    def why(job: JobView) -> str:
        queue = "second queue" if job.name in rank else "first queue"
        return f"{job.attained / 3600:.1f} GPU-hours attained, {queue}"

    return in_order(order, cluster, why=why), late


def in_order(
    jobs: Jobs, cluster: Cluster, *, why: Callable[[JobView], str], waits: bool = False
) -> dict[str, Allocation]:
    """Allocations of the jobs that fit, taken in the order given, or with `waits` of those before the first that does not."""
    sizes = {job.name: len(job.gpu_ids) for job in jobs if job.pinned and job.gpu_ids}
    free = cluster.gpus - sum(sizes.values())
    for job in jobs:
        if job.name not in sizes and job.asked <= free:
            sizes[job.name] = job.asked
            free -= job.asked
        elif job.name not in sizes and waits:
            break
    return place(jobs, sizes, cluster, why=lambda job, _: why(job), own_batch=True)
