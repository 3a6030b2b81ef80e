"""The loop over jobs that run: looks how each stands, asks a policy, and carries out what it has decided.

(1) No GPU is given out before all processes of the job that had it have ended or given it back.
(2) A job that does not train in steps that can be resized keeps its GPUs until it ends; so does one that has not come to its first step yet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from patrickstar.cluster.four_numbers import FourNumbers
from patrickstar.cluster.job_view import Allocation, Cluster, Ids, Policy, decide
from patrickstar.cluster.simulation import DONE, Outcome, SimulatedJob, allocated
from patrickstar.cluster.workload import Submission
from patrickstar.errors import ConfigError
from patrickstar.sharing.elastic_runs import ElasticRuns
from patrickstar.sharing.jobs_file import SharedJob, read_jobs
from patrickstar.sharing.live_job import LiveJob
from patrickstar.sharing.sharing_directory import SharingDirectory

POLL_S: Final = 0.25
TICK_S: Final = 30.0  # between two decisions where nothing else happens
STOPPED: Final = 143  # the exit status of a job that was told to stop and has saved
LOST: Final = os.EX_TEMPFAIL  # of one that has lost too many ranks with their nodes, and can go on where there is room


@dataclass(slots=True, eq=False, kw_only=True)
class Dispatcher:
    """Jobs of a file on GPUs, until all have ended. `say` is given a line for each change, with its reason.

    `limit`: of the GPUs that jobs may ever have together; 0: those that there are.
    """

    path: Path
    policy: Policy
    cluster: Cluster
    executor: ElasticRuns
    directory: SharingDirectory
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep
    limit: int = 0

    jobs: dict[str, LiveJob] = field(default_factory=dict)
    now: float = 0.0
    state: Any = None
    decisions: int = 0
    decided: frozenset[tuple[str, bool]] = frozenset()
    """What the last decision was about: jobs that are there, and which of them can be changed."""
    next_tick: float = 0.0
    stamp: tuple[int, int] = (0, 0)

    def run(self, *, resume: bool = False) -> None:
        """Runs the jobs of the file, and those that come to be in it. PolicyError: as a simulation."""
        if resume:
            before = self.directory.read()
            self.now = before["now"]
            self.jobs = {record["of"]["name"]: LiveJob.of_record(record) for record in before["jobs"]}
        began = self.clock() - self.now
        try:
            while self._turn(round(self.clock() - began, 3)):
                self.wait(POLL_S)
        finally:
            self.executor.close()
            for job in [job for job in self.jobs.values() if job.gpu_ids]:
                job.state = "closing"
                self._look(job, 0.0)  # it may have come to its end
            self._write()

    def _turn(self, now: float) -> bool:
        """Does what there is to do; gives whether some job has not ended."""
        passed, self.now = now - self.now, now
        self._reread()
        for job in self.jobs.values():
            if job.gpu_ids:
                self._look(job, passed)
        if (gpus := self.executor.gpus) != self.cluster.gpus:
            self.say(f"{now:8.1f} s  {gpus} GPUs are there now, {self.cluster.gpus} were")
            self.cluster = replace(self.cluster, gpus=gpus, gpus_per_node=max(1, gpus))
            self.state, self.decided = None, frozenset()
        held = sum(len(job.gpu_ids) for job in self.jobs.values())
        active = [job for job in self.jobs.values() if job.finish is None and job.submit <= now]
        active.sort(key=lambda job: job.submit)
        there = frozenset((job.of.name, job.has_begun) for job in active)
        # Where GPUs are gone that jobs still count on, those will have noticed in a moment.
        if active and held <= self.cluster.gpus and (there != self.decided or now >= self.next_tick):
            self.decided, self.next_tick = there, now + TICK_S
            self._decide(active)
        self._carry_out(active)
        self._write()
        return any(job.finish is None for job in self.jobs.values())

    # the file

    def _reread(self) -> None:
        try:
            found = self.path.stat()
        except OSError:  # an editor may be about to put another in its place
            return
        before, self.stamp = self.stamp, (found.st_mtime_ns, found.st_size)
        if before == self.stamp:
            return
        try:
            self._submit(read_jobs(self.path, gpus=self.limit or self.cluster.gpus)[1])
        except ConfigError as error:
            self.say(f"{error}; jobs stay as they were")

    def _submit(self, jobs: tuple[SharedJob, ...]) -> None:
        """Takes up new jobs, drops those that are not there any more and have not started, and of others what does not concern their processes."""
        names = {job.name for job in jobs}
        for name in [name for name, job in self.jobs.items() if job.start is None and name not in names]:
            self._tell(name, f"not in {self.path} any more, dropped")
            del self.jobs[name]
        for new in jobs:
            job = self.jobs.setdefault(new.name, LiveJob(new, max(new.submit, self.now)))
            if job.start is None:
                job.of, job.submit = new, max(new.submit, min(job.submit, self.now))
            else:
                job.of = replace(job.of, steps=new.steps, priority=new.priority, user=new.user)
        self.decided = frozenset()

    # jobs

    def _look(self, job: LiveJob, passed: float) -> None:
        job.attained += passed * len(job.gpu_ids)
        job.ran += passed
        standing = self.executor.status(job.of.name)
        if standing.exit_status is None:
            job.take(standing, self.now)
            if len(standing.gpu_ids) < len(job.gpu_ids):  # lost, or given back: what comes next is to be decided
                job.target = min(job.target, len(standing.gpu_ids))
            self._holds(job, standing.gpu_ids, job.why)
            if job.predicted is None and job.measured and standing.size:
                view = job.view(self.jobs.values())
                job.predicted = self.now + view.rest / view.speed.own_rates([standing.size]).item()
            return
        lost = standing.exit_status == LOST and job.step > max([-1, *job.losses[-3:-2]])
        was_told = standing.exit_status == STOPPED if job.state == "stopping" else job.state == "closing"
        stopped = lost or (was_told and standing.exit_status != 0)
        job.state = "waiting" if stopped else "failed" if standing.exit_status else "done"
        job.has_begun = False
        if lost:
            job.losses.append(job.step)
            self._tell(job.of.name, "has lost too many ranks with their nodes, and waits to go on from its checkpoint")
        if not stopped:
            job.finish = self.now
            how = f"failed with exit status {standing.exit_status}" if standing.exit_status else "has ended"
            self._tell(job.of.name, how)
        self._holds(job, (), job.why if stopped else DONE)

    def _holds(self, job: LiveJob, gpu_ids: Ids, why: str) -> None:
        """Notes what a job holds from now on."""
        if gpu_ids == job.gpu_ids:
            return
        job.resizes += bool(gpu_ids) and job.start is not None
        job.start = self.now if job.start is None else job.start
        job.epochs_at_change = job.view(self.jobs.values()).epochs
        job.gpu_ids, job.largest = gpu_ids, max(job.largest, len(gpu_ids))
        self.directory.add(allocated(job.of.name, self.now, Allocation(gpu_ids, 1.0, why)))

    # decisions

    def _decide(self, active: list[LiveJob]) -> None:
        gpus = self.cluster.gpus
        there = [job.view(self.jobs.values()) for job in active if job.gpu_ids or job.of.min <= gpus]
        # Counted anew, as there may have been more: sizes are all that is taken of a decision.
        ids = iter(range(gpus))
        views = [replace(one, gpu_ids=tuple(islice(ids, len(one.gpu_ids))), gpus=min(one.gpus, gpus)) for one in there]
        pinned = {one.name for one in views if one.pinned}
        self.decisions += 1
        given: dict[str, Any] = {"now": self.now, "state": self.state, "number": self.decisions}
        rng = np.random.default_rng(self.decisions)
        found, self.state = decide(self.policy, views, self.cluster, rng=rng, **given) if views else ({}, None)
        for job in active:
            new = found.get(job.of.name)
            job.target = len(job.gpu_ids) if job.of.name in pinned else len(new.gpu_ids) if new else 0
            job.why = new.why if new else "others come first" if job.of.min <= gpus else f"there are only {gpus} GPUs"
            job.is_ordered = False

    def _carry_out(self, active: list[LiveJob]) -> None:
        """Orders what has been decided and can be now: GPUs are given back first, and given out when they are free."""
        for job in active:
            if job.can_change and not job.is_ordered and job.target < len(job.gpu_ids):
                self._order(job)
                if job.target:
                    self.executor.resize(job.of.name, job.gpu_ids[: job.target], why=job.why)
                else:
                    job.state = "stopping"
                    self.executor.stop(job.of.name)
        held = {gpu for job in self.jobs.values() for gpu in job.gpu_ids}
        room = max(0, self.cluster.gpus - len(held))
        free = [gpu for gpu in range(self.cluster.gpus) if gpu not in held][:room]
        for job in active:
            missing = job.target - len(job.gpu_ids)
            if not 0 < missing <= len(free) or job.is_ordered or not (job.can_change or job.state == "waiting"):
                continue
            self._order(job)
            gpu_ids, free = tuple(sorted((*job.gpu_ids, *free[:missing]))), free[missing:]
            if job.state == "waiting":
                job.state = "running"
                self.executor.start(job.of, gpu_ids)
            else:
                self.executor.resize(job.of.name, gpu_ids, why=job.why)
            self._holds(job, gpu_ids, job.why)

    def _order(self, job: LiveJob) -> None:
        job.is_ordered = True
        self._tell(job.of.name, f"{len(job.gpu_ids)} -> {job.target} GPUs: {job.why}")

    def _tell(self, name: str, what: str) -> None:
        self.say(f"{self.now:8.1f} s  {name}: {what}")

    # how it stands

    def _write(self) -> None:
        every = self.jobs.values()
        told = [{**asdict(job), "rest": job.rest(every), "per_step": job.step_seconds(every)} for job in every]
        self.directory.write({"now": self.now, "gpus": self.cluster.gpus, "jobs": told})

    def outcome(self) -> Outcome:
        """Jobs that have started and ended, as those of a simulation are told of."""
        found = []
        for job in self.jobs.values():
            if job.start is not None and job.finish is not None:
                of, course = job.of, cast(FourNumbers, job.view(self.jobs.values()).speed)
                known = Submission(name=of.name, submit=job.submit, gpus=of.max, max_gpus=of.max, course=course)
                so_far = {name: getattr(job, name) for name in ("start", "finish", "resizes", "attained", "ran")}
                found.append(SimulatedJob(known, 0.0, 1.0, **so_far))
        events = self.directory.events()
        gpus = max([self.cluster.gpus - 1, *(gpu for event in events for gpu in event["gpus"])]) + 1
        return Outcome(replace(self.cluster, gpus=gpus), tuple(found), events, (0.0,))
