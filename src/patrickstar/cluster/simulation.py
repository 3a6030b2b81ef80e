"""A workload under a policy, event by event: arrivals, ends, changes of speed, and a clock.

(1) No GPU has two jobs at a time. A decision that gives one twice, or one that is not there, ends the simulation and is named.
(2) A job's work is done once: what is done when it is stopped or resized is kept, in the middle of an epoch too.
(3) While a start or a resize takes place GPUs are held and nothing is done.
(4) The policy is asked at arrivals, ends and ticks, after all that happens at that moment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np

from patrickstar.cluster.decision import decide, refusal
from patrickstar.cluster.job_view import Allocation, Cluster, Ids, JobView, Policy
from patrickstar.cluster.workload import Submission

Event = dict[str, Any]
Key = TypeVar("Key")
DONE: Final = "done"  # why a job that has ended holds nothing
PATIENCE: Final = 10_000  # decisions in a row that may give nothing to anybody


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """One job on its way. `attained` and `lost` are GPU-seconds held, and those of them without progress."""

    submission: Submission
    error: float
    """What its rest is told to be, as a factor of the true one."""
    steepness: float
    """How fast its loss falls."""

    done: float = 0.0
    samples: float = 0.0
    attained: float = 0.0
    ran: float = 0.0
    lost: float = 0.0
    largest: int = 0
    allocation: Allocation | None = None
    epochs_at_change: int = 0
    start: float = math.nan
    finish: float = math.nan
    resizes: int = 0
    held_until: float = 0.0
    at: float = 0.0
    """When the above was last brought up to date."""
    useful: float = 0.0
    sampled: float = 0.0
    """Work and samples a second, until `next_at`."""
    next_at: float = math.inf
    mark: float = 0.0
    """When it ends or its speed changes, and the work that it has then done."""

    def advance(self, now: float) -> None:
        """Does what its GPUs have done by now."""
        if self.allocation is not None:
            held, worked = now - self.at, max(0.0, now - max(self.at, self.held_until))
            gpus = len(self.allocation.gpu_ids)
            # At its mark by definition, whatever the seconds until then have been rounded to; and never beyond.
            self.done = self.mark if now == self.next_at else min(self.done + worked * self.useful, self.mark)
            self.samples += worked * self.sampled
            self.attained += held * gpus
            self.ran += held
            self.lost += (held - worked) * gpus
        self.at = now

    def set_speed(self, cluster: Cluster) -> None:
        """Finds how fast it is on what it holds, and when that changes; it is up to date."""
        self.next_at = math.inf
        if self.allocation is None:
            return
        gpus, batch = self.allocation.gpu_ids, self.allocation.batch
        course, nodes = self.submission.course, cluster.nodes(gpus)
        speed, self.mark = course.at(self.done), course.change_after(self.done)
        self.useful = speed.useful_per_s(len(gpus), batch=batch, nodes=nodes)
        self.sampled = speed.samples_per_s(len(gpus), batch=batch, nodes=nodes)
        if self.useful > 0:
            self.next_at = max(self.at, self.held_until) + (self.mark - self.done) / self.useful

    def view(self) -> JobView:
        of, course = self.submission, self.submission.course
        # Simulated: a loss that falls to a tenth or so, each job's in its own way, and what a classifier would then get right.
        fallen = (self.done / course.work) ** self.steepness * 0.9
        asked = {
            name: getattr(of, name) for name in ("name", "submit", "gpus", "min_gpus", "max_gpus", "priority", "user")
        }
        so_far = {
            name: getattr(self, name) for name in ("done", "samples", "attained", "ran", "largest", "epochs_at_change")
        }
        holds: dict[str, Any] = (
            {} if self.allocation is None else {"gpu_ids": self.allocation.gpu_ids, "batch": self.allocation.batch}
        )
        learned: dict[str, Any] = {"losses": (1.0, 1 - fallen), "accuracy": fallen}
        data: dict[str, Any] = {"epochs": course.epochs(self.done), "epoch_samples": course.epoch_samples}
        rest = (course.work - self.done) * self.error
        return JobView(speed=course.at(self.done), rest=rest, **asked, **so_far, **holds, **learned, **data)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulation: its jobs in the order of the workload, its events, and the seconds that each decision took."""

    cluster: Cluster
    jobs: tuple[SimulatedJob, ...]
    events: tuple[Event, ...]
    decision_seconds: tuple[float, ...]


def simulate(
    workload: Sequence[Submission],
    policy: Policy,
    *,
    cluster: Cluster,
    tick_s: float = 60.0,
    seed: int = 0,
    rest_error: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:
    """Outcome of a workload under a policy.

    Args:
        tick_s: seconds between two decisions where nothing else happens.
        rest_error: sigma of a log-normal factor, one a job, on what the policy is told to remain.
        clock: seconds, for how long decisions take.
    Raises:
        PolicyError: a decision gives a GPU twice or to nobody we know, raises, or leaves jobs waiting for ever.
    """
    return _World(workload, policy, cluster, tick_s, seed, rest_error, clock).run()


@dataclass(slots=True, eq=False)
class _World:
    workload: Sequence[Submission]
    policy: Policy
    cluster: Cluster
    tick_s: float
    seed: int
    rest_error: float
    clock: Callable[[], float]

    jobs: list[SimulatedJob] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    state: Any = None
    rng: np.random.Generator = field(default_factory=np.random.default_rng)

    def run(self) -> Outcome:
        draws = np.random.default_rng([self.seed, 1])
        errors = np.exp(draws.normal(0.0, 1.0, len(self.workload)) * self.rest_error)
        steepness = np.exp(draws.normal(0.0, 0.3, len(self.workload)))
        self.jobs = [
            SimulatedJob(*each) for each in zip(self.workload, errors.tolist(), steepness.tolist(), strict=True)
        ]
        self.rng = np.random.default_rng([self.seed, 2])
        coming = sorted(range(len(self.jobs)), key=lambda at: (self.workload[at].submit, at), reverse=True)
        active: list[SimulatedJob] = []
        now, idle = 0.0, 0
        while active or coming:
            arrival = self.workload[coming[-1]].submit if coming else math.inf
            tick = (math.floor(now / self.tick_s) + 1) * self.tick_s if active else math.inf
            now = min(arrival, tick, min((job.next_at for job in active), default=math.inf))
            decides = now in (arrival, tick)
            for job in [job for job in active if job.next_at == now]:
                job.advance(now)
                if job.done == job.submission.course.work:
                    job.finish, job.allocation = now, None
                    self._tell(job, now, Allocation((), 0.0, DONE), hold=0.0)
                    active.remove(job)
                    decides = True
                else:
                    job.set_speed(self.cluster)
            while coming and self.workload[coming[-1]].submit <= now:
                active.append(self.jobs[coming.pop()])
                active[-1].at = now
            if decides and active:
                self._decide(active, now)
                idle = 0 if coming or any(job.allocation for job in active) else idle + 1
                if idle == PATIENCE:
                    what = f"{idle} decisions in a row gave nothing to {len(active)} jobs that wait"
                    raise refusal(self.policy, len(self.seconds) + 1, now, what)
        return Outcome(self.cluster, tuple(self.jobs), tuple(self.events), tuple(self.seconds))

    def _decide(self, active: Sequence[SimulatedJob], now: float) -> None:
        for job in active:
            if now > job.at:
                job.advance(now)
        views = tuple(job.view() for job in active)
        began, number = self.clock(), len(self.seconds) + 1
        given: dict[str, Any] = {"now": now, "state": self.state, "rng": self.rng, "number": number}
        found, self.state = decide(self.policy, views, self.cluster, **given)
        took = self.clock() - began
        self.seconds.append(took)
        if hasattr(self.state, "event"):
            self.events.append({"event": "generation", "t": now, **self.state.event()})
        stopped = Allocation((), 0.0, "others come first")
        changes = {}
        for job in active:
            new, held = found.get(job.submission.name, stopped), job.allocation or stopped
            if held.gpu_ids != new.gpu_ids or (new.gpu_ids and held.batch != new.batch):
                changes[job] = new
        holds = {job: () if job.allocation is None else job.allocation.gpu_ids for job in changes}
        for job, gpu_ids in in_order_of_giving({job: new.gpu_ids for job, new in changes.items()}, holds):
            if gpu_ids == changes[job].gpu_ids:
                self._give(job, now, changes[job])
            else:
                why = f"gives back what others get now; {changes[job].why}"
                self._tell(job, now, Allocation(gpu_ids, changes[job].batch, why), hold=self.cluster.resize_s)

    def _give(self, job: SimulatedJob, now: float, new: Allocation) -> None:
        """Changes what a job holds, at a moment until which it is up to date."""
        before, hold = job.allocation, max(0.0, job.held_until - now)
        if before is None:
            hold = self.cluster.start_s
        elif new.gpu_ids and new.gpu_ids != before.gpu_ids:
            hold = max(self.cluster.resize_s, hold)  # a start under way is not cut short by a resize
        job.held_until = now + hold
        if before is None or new.gpu_ids != before.gpu_ids:
            job.epochs_at_change = job.submission.course.epochs(job.done)
            job.resizes += bool(new.gpu_ids) and not math.isnan(job.start)
        job.start = now if math.isnan(job.start) else job.start
        job.allocation = new if new.gpu_ids else None
        job.largest = max(job.largest, len(new.gpu_ids))
        job.set_speed(self.cluster)
        self._tell(job, now, new, hold=hold if new.gpu_ids else 0.0)

    def _tell(self, job: SimulatedJob, now: float, new: Allocation, *, hold: float) -> None:
        what = {"event": "allocate", "t": now, "job": job.submission.name, "gpus": list(new.gpu_ids)}
        self.events.append({**what, "batch": new.batch, "hold": hold, "why": new.why})


def in_order_of_giving(wanted: Mapping[Key, Ids], holds: Mapping[Key, Ids]) -> list[tuple[Key, Ids]]:
    """Changes of one moment in an order in which every GPU is given back before it is given out.

    Where jobs change places all round, the first of them keeps what stays its own, and gets the rest when that is free.
    """
    owner = {gpu: key for key, gpus in holds.items() for gpu in gpus}
    left, order = dict(wanted), []
    while left:
        ready = [key for key, gpus in left.items() if all(owner.get(gpu, key) == key for gpu in gpus)]
        if not ready:
            first = next(iter(left))
            order.append((first, tuple(gpu for gpu in left[first] if gpu in holds[first])))
            owner = {gpu: key for gpu, key in owner.items() if key != first or gpu in left[first]}
        for key in ready:
            order.append((key, left.pop(key)))
            for gpu in holds[key]:
                owner.pop(gpu, None)
    return order
