"""Allocations of rigid policies: every job the GPUs asked for and its own batch, in an order, or nothing."""

from __future__ import annotations

from collections.abc import Callable

from patrickstar.cluster.gpu_ids import place
from patrickstar.cluster.job_view import Allocation, Cluster, Jobs, JobView


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
