"""A scheduling decision as frozen values: jobs as a policy sees them, the cluster, and what each job is to hold.

A policy is a function of these alone. The same one decides in a simulation and over jobs that run, whose speeds are measured and whose
rest is predicted: whoever calls it makes the views, and has `decide` ask it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from patrickstar.errors import Error

Ids: TypeAlias = tuple[int, ...]
Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


class Speed(Protocol):
    """Speeds of one job at its present point, by number of GPUs, their nodes (0: as few as hold them) and batch.

    A batch is a factor of the job's own one; work is counted in samples of one batch of reference, as a sample of a larger one brings less.
    A speed of 0 is that of a job that cannot run so.
    """

    def samples_per_s(self, gpus: int, *, batch: float, nodes: int = 0) -> float: ...
    def useful_per_s(self, gpus: int, *, batch: float, nodes: int = 0) -> float: ...
    def best_batch(self, gpus: int, *, nodes: int = 0) -> float:
        """The batch with which most work is done a second."""

    def batches(self) -> tuple[float, float]:
        """The smallest and the largest batch."""

    def best_rates(self, sizes: Sequence[int]) -> Numbers:
        """Work a second at each of these sizes with its best batch. [sizes]"""

    def own_rates(self, sizes: Sequence[int]) -> Numbers:
        """Work a second at each of these sizes with the job's own batch. [sizes]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One unfinished job, as it is known when a decision is made. Times are seconds on the clock of `now`."""

    name: str
    submit: float
    gpus: int
    """GPUs that its user asked for."""
    min_gpus: int = 1
    max_gpus: int = 1 << 30
    pinned: bool = False
    """Once it runs it is never resized and never stopped."""
    priority: int = 0
    user: str = ""
    speed: Speed
    rest: float
    """Work still to do, known or predicted, in samples of its own batch."""
    done: float = 0.0
    samples: float = 0.0
    """Samples computed, useful or not."""
    epoch_samples: float = 1.0
    """Samples of its data set."""
    epochs: int = 0
    epochs_at_change: int = 0
    """Epochs that it had finished when its GPUs were last changed."""
    losses: tuple[float, float] = (1.0, 1.0)
    """The first loss and the last."""
    accuracy: float = 0.0
    attained: float = 0.0
    """GPU-seconds held so far."""
    ran: float = 0.0
    """Seconds for which it has held GPUs."""
    largest: int = 0
    """The most GPUs it has run on."""
    gpu_ids: Ids = ()
    """GPUs that it holds now."""
    batch: float = 1.0

    @property
    def asked(self) -> int:
        """GPUs of a rigid allocation."""
        return min(max(self.gpus, self.min_gpus), self.max_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal GPUs with ids 0 to `gpus` - 1, node by node, and what changes cost."""

    gpus: int
    gpus_per_node: int = 4
    start_s: float = 30.0
    """Seconds that a start, or a return after a stop, takes before work begins."""
    resize_s: float = 2.0
    """Seconds without work when a running job's GPUs are changed."""

    def nodes(self, gpu_ids: Sequence[int]) -> int:
        """Nodes that these GPUs are on."""
        return len({gpu // self.gpus_per_node for gpu in gpu_ids})


@dataclass(frozen=True, slots=True)
class Allocation:
    """GPUs for a job, its batch as a factor of its own one, and a sentence that says why."""

    gpu_ids: Ids
    batch: float
    why: str


Jobs: TypeAlias = Sequence[JobView]
Decision: TypeAlias = tuple[Mapping[str, Allocation], Any]
"""Allocations by job, where one that is not there holds nothing, and the state for the next decision."""
Policy: TypeAlias = Callable[[Jobs, Cluster, float, Any, np.random.Generator], Decision]
"""`(jobs, cluster, now, state, rng) -> (allocations, state)`: jobs in order of submission, `state` as the last call gave it, `None` at first.

The function is pure but for what it draws from `rng`. A state with a method `event()` has what that gives written to the log of events.
"""


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
