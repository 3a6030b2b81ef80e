"""Shortest remaining time first, of jobs that keep the size asked for; stops those that run for shorter ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from patrickstar.cluster.job_view import Allocations, Cluster, JobView
from patrickstar.cluster.policies.rigid import in_order


def srtf(
    jobs: Sequence[JobView],
    cluster: Cluster,
    now: float,  # noqa: ARG001 - a policy's
    state: Any,
    rng: np.random.Generator,  # noqa: ARG001 - a policy's
) -> tuple[Allocations, Any]:
    """Allocations in order of the seconds of work left on the GPUs asked for; what does not fit is passed over."""
    left = {job.name: job.rest / job.speed.own_rates([job.asked]).item() for job in jobs}
    order = sorted(jobs, key=lambda job: (-job.priority, left[job.name], job.submit))
    return in_order(order, cluster, why=lambda job, _: f"{left[job.name]:.0f} s left, shorter ones first"), state
