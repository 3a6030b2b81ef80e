"""Allocations of rigid policies: every job the GPUs asked for and its own batch, in an order, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from patrickstar.cluster.gpu_ids import assign
from patrickstar.cluster.job_view import Allocation, Cluster, JobView


def in_order(
    jobs: Sequence[JobView], cluster: Cluster, *, why: Callable[[JobView, int], str], waits: bool = False
) -> dict[str, Allocation]:
    """Allocations of the jobs that fit, taken in the order given; `why` is asked for the sentence of a job and its place in it.

    Args:
        waits: whether those behind the first job that does not fit wait with it.
    """
    sizes: dict[str, int] = {}
    free = cluster.gpus - sum(len(job.gpu_ids) for job in jobs if job.pinned)
    places = {}
    for place, job in enumerate(jobs, start=1):
        held = len(job.gpu_ids) if job.pinned else 0
        if job.asked <= free + held:
            sizes[job.name] = held or job.asked
            free -= sizes[job.name] - held
            places[job.name] = place
        elif waits:
            # Pinned ones behind it hold theirs all the same.
            sizes |= {other.name: len(other.gpu_ids) for other in jobs[place:] if other.pinned and other.gpu_ids}
            break
    ids = assign(jobs, sizes, cluster)
    return {
        job.name: Allocation(ids[job.name], 1.0, why(job, places.get(job.name, 0))) for job in jobs if job.name in ids
    }
