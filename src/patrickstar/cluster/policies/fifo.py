"""First in, first out: jobs start in order of submission, higher priorities first, and keep what they asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from patrickstar.cluster.job_view import Allocations, Cluster, JobView
from patrickstar.cluster.policies.rigid import in_order


def fifo(
    jobs: Sequence[JobView],
    cluster: Cluster,
    now: float,  # noqa: ARG001 - a policy's
    state: Any,
    rng: np.random.Generator,  # noqa: ARG001 - a policy's
) -> tuple[Allocations, Any]:
    """Allocations of those that run, and of those that wait until the first that does not fit: nobody overtakes it."""
    order = sorted(jobs, key=lambda job: (not job.gpu_ids, -job.priority, job.submit))
    return in_order(order, cluster, why=lambda _, place: f"{place}. to be submitted, as asked", waits=True), state
