"""Jobs that share slots, for tests: an executor whose jobs are numbers, on a clock that is told what time it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from patrickstar.cluster.job_view import Cluster, Ids
from patrickstar.cluster.policies.catalogue import find_policy
from patrickstar.sharing.dispatcher import Dispatcher
from patrickstar.sharing.jobs_file import SharedJob, read_jobs
from patrickstar.sharing.live_job import Standing
from patrickstar.sharing.sharing_directory import SharingDirectory

STARTS_S, SHRINKS_S, STOPS_S = 3.0, 1.0, 2.0


@dataclass
class FakeRun:
    gpu_ids: Ids
    begins_at: float
    shrinks: tuple[float, Ids] | None = None
    ends: tuple[float, int] | None = None


@dataclass
class FakeExecutor:
    """Jobs of a step a second on one slot, without a serial share. A job `crash` fails at step 5; one whose command is `plain` reports no steps."""

    gpus: int
    now: float = 0.0
    runs: dict[str, FakeRun] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    jobs: dict[str, SharedJob] = field(default_factory=dict)
    seen: dict[str, list[int]] = field(default_factory=dict)
    closed: bool = False

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for name, run in [*self.runs.items()]:
            if run.shrinks and self.now >= run.shrinks[0]:
                run.gpu_ids, run.shrinks = run.shrinks[1], None
            if self.now > run.begins_at and run.ends is None:
                self.steps[name] = self.steps.get(name, 0.0) + seconds * len(run.gpu_ids)
                if name == "crash" and self.steps[name] >= 5:
                    run.ends = self.now, 7
                elif self.steps[name] >= (self.jobs[name].steps or 60):
                    run.ends = self.now, 0
        self.expect_no_slot_twice()

    def expect_no_slot_twice(self) -> None:
        held = [gpu for run in self.runs.values() for gpu in run.gpu_ids]
        assert len(held) == len(set(held))
        assert set(held) <= set(range(self.gpus))

    def start(self, job: SharedJob, gpu_ids: Ids) -> None:
        assert job.name not in self.runs
        assert job.min <= len(gpu_ids) <= job.max
        self.jobs[job.name] = job
        self.runs[job.name] = FakeRun(gpu_ids, self.now + STARTS_S)
        self.seen.setdefault(job.name, []).append(len(gpu_ids))
        self.expect_no_slot_twice()

    def resize(self, name: str, gpu_ids: Ids, *, why: str) -> None:
        run = self.runs[name]
        assert self.jobs[name].min <= len(gpu_ids) <= self.jobs[name].max
        assert self.status(name).has_begun
        self.seen[name].append(len(gpu_ids))
        if len(gpu_ids) > len(run.gpu_ids):
            run.gpu_ids = gpu_ids
        else:
            run.shrinks = self.now + SHRINKS_S, gpu_ids
        self.expect_no_slot_twice()

    def stop(self, name: str) -> None:
        assert self.status(name).has_begun
        self.seen[name].append(0)
        self.runs[name].ends = self.now + STOPS_S, 143

    def status(self, name: str) -> Standing:
        run = self.runs[name]
        if run.ends and self.now >= run.ends[0]:
            return Standing(exit_status=self.runs.pop(name).ends[1])
        begun = self.now > run.begins_at and self.jobs[name].run != "plain"
        step = int(self.steps.get(name, 0)) if begun else 0
        return Standing(gpu_ids=run.gpu_ids, size=len(run.gpu_ids) * begun, step=step, has_begun=begun)

    def close(self) -> None:
        self.closed = True
        for run in self.runs.values():
            run.ends = self.now, 0 if run.ends and run.ends[1] == 0 else 1


def job(name: str, **keys: Any) -> dict[str, Any]:
    return {"name": name, "run": "elastic", **keys}


def write_jobs(path: Path, *jobs: Mapping[str, Any], gpus: int = 4) -> Path:
    path.write_text(yaml.safe_dump({"gpus": gpus, "jobs": list(jobs)}))
    return path


def dispatcher(
    path: Path, policy: Any = "soonest", *, executor: FakeExecutor | None = None
) -> tuple[Dispatcher, list[str]]:
    """A dispatcher over the jobs of a file, and what it says."""
    gpus, _ = read_jobs(path)
    executor = executor or FakeExecutor(gpus)
    told: list[str] = []
    made = Dispatcher(
        path=path,
        policy=find_policy(policy) if isinstance(policy, str) else policy,
        cluster=Cluster(gpus=gpus, gpus_per_node=gpus, start_s=STARTS_S),
        executor=executor,
        directory=SharingDirectory(path.with_suffix(".share")),
        say=told.append,
        clock=lambda: executor.now,
        wait=executor.wait,
    )
    made.directory.path.mkdir(exist_ok=True)
    return made, told
