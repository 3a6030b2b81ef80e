"""A workload under a policy, event by event: arrivals, ends, changes of speed, and a clock.

(1) No GPU has two jobs at a time. A decision that gives one twice, or one that is not there, ends the simulation and is named.
(2) A job's work is done once: what is done when it is stopped or resized is kept, in the middle of an epoch too.
(3) While a start or a resize takes place GPUs are held and nothing is done.
(4) The policy is asked at arrivals, ends and ticks, after all that happens at that moment.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from patrickstar.cluster.job_view import Allocation, Cluster, Ids, JobView, Policy, decide, refusal
from patrickstar.cluster.workload import Submission

Event = dict[str, Any]
Key = TypeVar("Key")
NOTHING: Final = Allocation((), 1.0, "")
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
    holds: Allocation = NOTHING
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
        if gpus := len(self.holds.gpu_ids):
            held, worked = now - self.at, max(0.0, now - max(self.at, self.held_until))
            # At its mark by definition, whatever the seconds until then have been rounded to; and never beyond.
            self.done = self.mark if now == self.next_at else min(self.done + worked * self.useful, self.mark)
            self.samples += worked * self.sampled
            self.attained += held * gpus
            self.ran += held
            self.lost += (held - worked) * gpus
        self.at = now

    def give(self, new: Allocation, cluster: Cluster) -> float:
        """Changes what it holds, when it is up to date; gives the seconds from then on without progress."""
        before, hold = self.holds.gpu_ids, max(0.0, self.held_until - self.at)
        if not before:
            hold = cluster.start_s
        elif new.gpu_ids and new.gpu_ids != before:
            hold = max(cluster.resize_s, hold)  # a start under way is not cut short by a resize
        self.held_until = self.at + hold
        if new.gpu_ids != before:
            self.epochs_at_change = self.submission.course.epochs(self.done)
            self.resizes += bool(new.gpu_ids) and not math.isnan(self.start)
        self.start = self.at if math.isnan(self.start) else self.start
        self.holds = new if new.gpu_ids else NOTHING
        self.largest = max(self.largest, len(new.gpu_ids))
        self.set_speed(cluster)
        return hold if new.gpu_ids else 0.0

    def set_speed(self, cluster: Cluster) -> None:
        """Finds how fast it is on what it holds, and when that changes; it is up to date."""
        self.next_at = math.inf
        gpus, batch = self.holds.gpu_ids, self.holds.batch
        if not gpus:
            return
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
        holds: dict[str, Any] = {"gpu_ids": self.holds.gpu_ids, "batch": self.holds.batch}
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
) -> Outcome:
    """Outcome of a workload under a policy.

    Args:
        tick_s: seconds between two decisions where nothing else happens.
        rest_error: sigma of a log-normal factor, one a job, on what the policy is told to remain.
    Raises:
        PolicyError: a decision gives a GPU twice or to nobody we know, raises, or leaves jobs waiting for ever.
    """
    draws = np.random.default_rng([seed, 1])
    errors = np.exp(draws.normal(0.0, 1.0, len(workload)) * rest_error)
    steepness = np.exp(draws.normal(0.0, 0.3, len(workload)))
    jobs = [SimulatedJob(*each) for each in zip(workload, errors.tolist(), steepness.tolist(), strict=True)]
    coming = deque(sorted(jobs, key=lambda job: job.submission.submit))
    active: list[SimulatedJob] = []
    events: list[Event] = []
    seconds: list[float] = []
    state, rng = None, np.random.default_rng([seed, 2])
    now, idle = 0.0, 0
    while active or coming:
        arrival = coming[0].submission.submit if coming else math.inf
        tick = (math.floor(now / tick_s) + 1) * tick_s if active else math.inf
        tick += tick_s * (tick <= now)  # the quotient at a tick may have been rounded down, to that very tick
        now = min([arrival, tick, *(job.next_at for job in active)])
        decides = now in (arrival, tick)
        for job in [job for job in active if job.next_at == now]:
            job.advance(now)
            if job.done == job.submission.course.work:
                job.finish = now
                events.append(allocated(job.submission.name, now, Allocation((), 0.0, DONE)))
                active.remove(job)
                decides = True
            else:
                job.set_speed(cluster)
        while coming and coming[0].submission.submit <= now:
            active.append(coming.popleft())
            active[-1].at = now
        if not (decides and active):
            continue
        for job in active:
            if now > job.at:
                job.advance(now)
        views, number = tuple(job.view() for job in active), len(seconds) + 1
        began = time.perf_counter()
        found, state = decide(policy, views, cluster, now=now, state=state, rng=rng, number=number)
        seconds.append(time.perf_counter() - began)
        if hasattr(state, "event"):
            events.append({"event": "generation", "t": now, **state.event()})
        events += _carry_out(found, active, cluster, now)
        idle = 0 if coming or any(job.holds.gpu_ids for job in active) else idle + 1
        if idle == PATIENCE:
            what = f"{idle} decisions in a row gave nothing to {len(active)} jobs that wait"
            raise refusal(policy, number + 1, now, what)
    return Outcome(cluster, tuple(jobs), tuple(events), tuple(seconds))


def _carry_out(
    found: Mapping[str, Allocation], active: Sequence[SimulatedJob], cluster: Cluster, now: float
) -> Iterator[Event]:
    stopped = Allocation((), 0.0, "others come first")
    changes = {}
    for job in active:
        new = found.get(job.submission.name, stopped)
        if job.holds.gpu_ids != new.gpu_ids or (new.gpu_ids and job.holds.batch != new.batch):
            changes[job] = new
    wanted = {job: new.gpu_ids for job, new in changes.items()}
    for job, gpu_ids in in_order_of_giving(wanted, {job: job.holds.gpu_ids for job in changes}):
        name, new = job.submission.name, changes[job]
        if gpu_ids == new.gpu_ids:
            yield allocated(name, now, new, hold=job.give(new, cluster))
        else:
            part = Allocation(gpu_ids, new.batch, f"gives back what others get now; {new.why}")
            yield allocated(name, now, part, hold=cluster.resize_s)


def allocated(name: str, now: float, new: Allocation, *, hold: float = 0.0) -> Event:
    """The event that a job's GPUs or batch change, after which it makes no progress for some seconds."""
    what = {"event": "allocate", "t": now, "job": name, "gpus": list(new.gpu_ids)}
    return {**what, "batch": new.batch, "hold": hold, "why": new.why}


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
