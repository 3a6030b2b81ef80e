"""One decision of a policy: asked for, and refused where it cannot be carried out. Simulated and running jobs are decided over alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from patrickstar.cluster.job_view import Allocation, Cluster, JobView, Policy
from patrickstar.errors import Error


class PolicyError(Error):
    """A decision that cannot be carried out, or a policy that raised: which one, at what moment."""


def decide(
    policy: Policy,
    jobs: Sequence[JobView],
    cluster: Cluster,
    *,
    now: float,
    state: Any,
    rng: np.random.Generator,
    number: int,
) -> tuple[dict[str, Allocation], Any]:
    """Allocations by job and the policy's next state. `number`: of the decision, for messages.

    Raises:
        PolicyError: the policy raises, gives a GPU twice or one that is not there, or a job what it cannot have.
    """
    try:
        given, state = policy(jobs, cluster, now, state, rng)
        found = dict(given)
    except Exception as error:
        raise refusal(policy, number, now, f"it raised {type(error).__name__}: {error}") from error
    for problem in _problems(found, {job.name: job for job in jobs}, cluster):
        raise refusal(policy, number, now, problem)
    return found, state


def _problems(found: Mapping[str, Allocation], jobs: Mapping[str, JobView], cluster: Cluster) -> Iterator[str]:
    """The first thing that cannot be carried out, if there is one."""
    owner: dict[int, str] = {}
    for name, new in found.items():
        if name not in jobs:
            yield f"it gives GPUs to {name!r}, which is not there or has ended"
        for gpu in new.gpu_ids:
            if not 0 <= gpu < cluster.gpus:
                yield f"it gives GPU {gpu} to {name!r}; there are 0 to {cluster.gpus - 1}"
            if gpu in owner:
                yield f"it gives GPU {gpu} to {owner[gpu]!r} and to {name!r}"
            owner[gpu] = name
        job, n = jobs[name], len(new.gpu_ids)
        least, most = job.speed.batches()
        if n and not job.min_gpus <= n <= job.max_gpus:
            yield f"it gives {n} GPUs to {name!r}, which takes {job.min_gpus} to {job.max_gpus}"
        if n and not least * (1 - 1e-9) <= new.batch <= most * (1 + 1e-9):
            yield f"it gives {name!r} {new.batch:g} times its batch, which may be {least:g} to {most:g}"


def refusal(policy: Policy, number: int, now: float, what: str) -> PolicyError:
    """The error that names a decision and says what is wrong with it."""
    name = getattr(policy, "__name__", type(policy).__name__)
    return PolicyError(f"decision {number} of policy {name}, at {now:g} s: {what}")
