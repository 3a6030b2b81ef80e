"""First in, first out: jobs start in order of submission, higher priorities first, and keep what they asked for."""

from __future__ import annotations

from typing import Any

from numpy.random import Generator

from patrickstar.cluster.job_view import Cluster, Decision, Jobs
from patrickstar.cluster.policies.rigid import in_order


def fifo(jobs: Jobs, cluster: Cluster, now: float, state: Any, rng: Generator) -> Decision:
    """Allocations of those that run, and of those that wait until the first that does not fit: nobody overtakes it."""
    order = sorted(jobs, key=lambda job: (not job.gpu_ids, -job.priority, job.submit))
    return in_order(order, cluster, why=lambda job: f"submitted at {job.submit:g} s, as asked", waits=True), state
