"""Pollux: GPUs and batches for the best harmonic mean of speedups over a fair share, by goodput.

Source: Qiao et al., "Pollux" (OSDI 2021), equation 11 with p = -1. What its genetic search looks for is found greedily here; its penalty
for restarts is left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.random import Generator

from patrickstar.cluster.gpu_ids import place
from patrickstar.cluster.job_view import Cluster, Decision, Jobs, JobView
from patrickstar.cluster.policies.greedy import share_out, size_grid


def pollux(jobs: Jobs, cluster: Cluster, now: float, state: Any, rng: Generator) -> Decision:
    """Allocations that maximise the harmonic mean of goodputs over those of a fair share, without knowing what remains.

    A job may get twice the GPUs it has run on at most, as nothing is known of it beyond. Where there are more jobs than GPUs, those with
    the least attained service run.
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
