"""One decision of a policy: asked for, and refused where it cannot be carried out. Simulated and running jobs are decided over alike."""

from __future__ import annotations

from collections.abc import Sequence
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
    by_name = {job.name: job for job in jobs}
    owner: dict[int, str] = {}
    for name, new in found.items():
        if name not in by_name:
            raise refusal(policy, number, now, f"it gives GPUs to {name!r}, which is not there or has ended")
        for gpu in new.gpu_ids:
            if not 0 <= gpu < cluster.gpus:
                raise refusal(policy, number, now, f"it gives GPU {gpu} to {name!r}; there are 0 to {cluster.gpus - 1}")
            if gpu in owner:
                raise refusal(policy, number, now, f"it gives GPU {gpu} to {owner[gpu]!r} and to {name!r}")
            owner[gpu] = name
        if new.gpu_ids and (what := _cannot_have(by_name[name], new)):
            raise refusal(policy, number, now, what)
    return found, state


def _cannot_have(job: JobView, new: Allocation) -> str:
    n = len(new.gpu_ids)
    if not job.min_gpus <= n <= job.max_gpus:
        return f"it gives {n} GPUs to {job.name!r}, which takes {job.min_gpus} to {job.max_gpus}"
    least, most = job.speed.batches()
    if not least * (1 - 1e-9) <= new.batch <= most * (1 + 1e-9):
        return f"it gives {job.name!r} {new.batch:g} times its batch, which may be {least:g} to {most:g}"
    return ""


def refusal(policy: Policy, number: int, now: float, what: str) -> PolicyError:
    """The error that names a decision and says what is wrong with it."""
    name = getattr(policy, "__name__", type(policy).__name__)
    return PolicyError(f"decision {number} of policy {name}, at {now:g} s: {what}")
