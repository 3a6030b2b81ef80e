"""Soonest: GPUs go where they bring forward the end of jobs most, short ones before long ones.

A greedy on the sum of (expected seconds to the end)^(-1/2), the seconds that a change costs included. The root lies between shortest
remaining time first, which would let long jobs wait, and equal speedups, which would let short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.random import Generator

from patrickstar.cluster.gpu_ids import place
from patrickstar.cluster.job_view import Cluster, Decision, Jobs, JobView, Numbers
from patrickstar.cluster.policies.greedy import share_out, size_grid

EXPONENT: Final = -0.5


def soonest(jobs: Jobs, cluster: Cluster, now: float, state: Any, rng: Generator) -> Decision:
    """Allocations that bring forward ends most, step by step; where there are more jobs than GPUs, the shortest run."""
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
