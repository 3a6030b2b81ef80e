"""Least attained service: Tiresias' two queues, without knowledge of what remains.

Source: Gu et al., "Tiresias" (NSDI 2019), discretized two-dimensional LAS; the threshold is that of the Pollux artifact's baseline.
"""

from __future__ import annotations

from typing import Any, Final

from numpy.random import Generator

from patrickstar.cluster.job_view import Cluster, Decision, Jobs, JobView
from patrickstar.cluster.policies.rigid import in_order

THRESHOLD_GPU_S: Final = 16 * 3600.0


def las(jobs: Jobs, cluster: Cluster, now: float, state: Any, rng: Generator) -> Decision:
    """Allocations to jobs below the threshold in order of submission, then to the others in the order in which they passed it.

    `state` is that order: names.
    """
    before = () if state is None else state
    passed = [job.name for job in jobs if job.attained >= THRESHOLD_GPU_S]
    late = tuple(name for name in before if name in passed) + tuple(name for name in passed if name not in before)
    rank = {name: place for place, name in enumerate(late, start=1)}
    order = sorted(jobs, key=lambda job: (-job.priority, rank.get(job.name, 0), job.submit))

    def why(job: JobView) -> str:
        queue = "second queue" if job.name in rank else "first queue"
        return f"{job.attained / 3600:.1f} GPU-hours attained, {queue}"

    return in_order(order, cluster, why=why), late
