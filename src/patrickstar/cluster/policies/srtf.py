"""Shortest remaining time first, of jobs that keep the size asked for; stops those that run for shorter ones."""

from __future__ import annotations

from typing import Any

from numpy.random import Generator

from patrickstar.cluster.job_view import Cluster, Decision, Jobs
from patrickstar.cluster.policies.rigid import in_order


def srtf(jobs: Jobs, cluster: Cluster, now: float, state: Any, rng: Generator) -> Decision:
    """Allocations in order of the seconds of work left on the GPUs asked for; what does not fit is passed over."""
    left = {job.name: job.rest / job.speed.own_rates([job.asked]).item() for job in jobs}
    order = sorted(jobs, key=lambda job: (-job.priority, left[job.name], job.submit))
    return in_order(order, cluster, why=lambda job: f"{left[job.name]:.0f} s left, shorter ones first"), state
