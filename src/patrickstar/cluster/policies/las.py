"""Least attained service: Tiresias' two queues, without knowledge of what remains.

Source: Gu et al., "Tiresias" (NSDI 2019), discretized two-dimensional LAS; the threshold is that of the Pollux artifact's baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from patrickstar.cluster.job_view import Allocations, Cluster, JobView
from patrickstar.cluster.policies.rigid import in_order

THRESHOLD_GPU_S: Final = 16 * 3600.0


def las(
    jobs: Sequence[JobView],
    cluster: Cluster,
    now: float,  # noqa: ARG001 - a policy's
    state: Any,
    rng: np.random.Generator,  # noqa: ARG001 - a policy's
) -> tuple[Allocations, Any]:
    """Allocations to jobs below the threshold in order of submission, then to the others in the order in which they passed it.

    `state` is that order: names.
    """
    before = () if state is None else state
    passed = [job.name for job in jobs if job.attained >= THRESHOLD_GPU_S]
    late = tuple(name for name in before if name in passed) + tuple(name for name in passed if name not in before)
    rank = {name: place for place, name in enumerate(late, start=1)}
    order = sorted(jobs, key=lambda job: (-job.priority, rank.get(job.name, 0), job.submit))

    def why(job: JobView, _: int) -> str:
        queue = "second queue" if job.name in rank else "first queue"
        return f"{job.attained / 3600:.1f} GPU-hours attained, {queue}"

    return in_order(order, cluster, why=why), late
