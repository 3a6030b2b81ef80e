"""Optimus: each job one GPU, then always to the one whose end a further GPU brings forward most; batches stay as they are.

Source: Peng et al., "Optimus" (EuroSys 2018), section 4.1, with known speeds and a known rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.random import Generator

from patrickstar.cluster.gpu_ids import place
from patrickstar.cluster.job_view import Cluster, Decision, Jobs, JobView
from patrickstar.cluster.policies.greedy import share_out, size_grid


def optimus(jobs: Jobs, cluster: Cluster, now: float, state: Any, rng: Generator) -> Decision:
    """Allocations that are best step by step for the sum of the seconds that jobs still take."""
    sizes = size_grid(jobs, cluster)
    order = sorted(jobs, key=lambda job: (-job.priority, job.submit))
    with np.errstate(divide="ignore"):
        left = {job.name: job.rest / job.speed.own_rates(sizes) for job in order}
    found = share_out(order, [-left[job.name] for job in order], sizes, cluster.gpus)

    def why(job: JobView, gpus: int) -> str:
        return f"{left[job.name][sizes.index(gpus)]:.0f} s left on {gpus} GPUs with its own batch"

    return place(order, found, cluster, why=why, own_batch=True), state
