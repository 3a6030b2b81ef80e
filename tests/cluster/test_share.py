"""`patrickstar cluster share`: real jobs, each under `patrickstar elastic run`, on slots of this machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from patrickstar.cluster.figures import figures
from patrickstar.cluster.job_view import Cluster
from patrickstar.cluster.policies.catalogue import find_policy
from patrickstar.cluster.simulation import simulate
from patrickstar.cluster.workload import Submission
from patrickstar.sharing.live_job import LiveJob
from patrickstar.sharing.sharing_directory import SharingDirectory
from tests.elastic.running import ENVIRONMENT, SOURCE, digest_of_one, digests, program

pytestmark = pytest.mark.slow


def job(name: str, steps: int, seconds: float, **keys: Any) -> dict[str, Any]:
    return {"name": name, "run": shlex.join(program(steps, seconds)), "steps": steps, **keys}


def share(path: Path, *flags: str, policy: str = "soonest") -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "patrickstar", "cluster", "share", str(path), "--policy", policy, *flags]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, env=ENVIRONMENT, cwd=SOURCE, **pipes)


def write_jobs(path: Path, *jobs: dict[str, Any], gpus: int) -> Path:
    path.write_text(yaml.safe_dump({"gpus": gpus, "jobs": list(jobs)}))
    return path


def weights(path: Path, names: Sequence[str]) -> list[set[str]]:
    return [digests((path.with_suffix(".share") / name / "output").read_text()) for name in names]


def processes_of(path: Path) -> list[int]:
    """Processes that have to do with these jobs: the directory is in their command or environment."""
    found = []
    for pid in Path("/proc").iterdir():
        if pid.name.isdigit() and int(pid.name) != os.getpid():
            try:
                known = (pid / "cmdline").read_bytes() + (pid / "environ").read_bytes()
            except OSError:
                continue
            if os.fsencode(path.with_suffix(".share")) in known:
                found.append(int(pid.name))
    return found


def nothing_is_left(path: Path, within_s: float = 60.0) -> bool:
    until = time.monotonic() + within_s
    while (there := processes_of(path)) and time.monotonic() < until:
        time.sleep(0.2)
    return not there


def test_three_jobs_on_two_slots_have_the_weights_of_each_alone(tmp_path: Path) -> None:
    seconds = {"short": 0.1, "other": 0.1, "long": 0.4}
    path = write_jobs(tmp_path / "JOBS.yaml", *(job(name, 20, each, max=2) for name, each in seconds.items()), gpus=2)
    running = share(path, "--report", str(tmp_path / "r.html"))
    output, _ = running.communicate(timeout=150)
    assert running.returncode == 0, output
    assert nothing_is_left(path, within_s=5)
    assert weights(path, [*seconds]) == [{digest_of_one(20)}] * 3
    assert path.with_suffix(".share").stat().st_mode & 0o777 == 0o700
    assert "long" in (tmp_path / "r.html").read_text()


MANY = {f"j{number:02}": 6 + 6 * (number * 5 % 12) for number in range(12)}


@pytest.mark.campaign
def test_twelve_jobs_end_when_a_simulation_says(tmp_path: Path) -> None:
    mean = {}
    for policy in ("fifo", "las", "soonest"):
        path = tmp_path / policy / "JOBS.yaml"
        path.parent.mkdir()
        jobs = [job(name, steps, 1.2, max=2 + 2 * (number % 2)) for number, (name, steps) in enumerate(MANY.items())]
        running = share(write_jobs(path, *jobs, gpus=4), policy=policy)
        output, _ = running.communicate(timeout=1500)
        assert running.returncode == 0, output
        assert nothing_is_left(path, within_s=5)
        assert weights(path, [*MANY]) == [{digest_of_one(steps)} for steps in MANY.values()]
        known = SharingDirectory(path.with_suffix(".share")).read()["jobs"]
        found = [LiveJob.of_record(record) for record in known]
        mean[policy] = sum(one.finish - one.submit for one in found if one.finish) / len(found)
        assert 0.8 < mean[policy] / simulated(found, policy) < 1.25, output
    assert mean["soonest"] <= 0.9 * mean["fifo"], mean


def simulated(jobs: Sequence[LiveJob], policy: str) -> float:
    """The mean time of jobs as a simulation has it that is given their speeds, and how long starts took."""
    workload = []
    for one in jobs:
        sizes = {"gpus": one.of.max, "min_gpus": one.of.min, "max_gpus": one.of.max}
        one.step = 0
        course: Any = one.view(jobs).speed
        workload.append(Submission(name=one.of.name, submit=one.submit, course=course, **sizes))
    starts = [one.ran - sum(seconds for _, seconds in one.measured.values()) for one in jobs]
    cluster = Cluster(gpus=4, gpus_per_node=4, start_s=sorted(starts)[len(starts) // 2])
    outcome = simulate(workload, find_policy(policy), cluster=cluster, tick_s=30.0)
    return float(figures(outcome, policy=policy, seed=0)["mean_jct"])


@pytest.mark.campaign
def test_killed_and_resumed_and_edited_nothing_is_lost(tmp_path: Path) -> None:
    names = {"a": 120, "b": 60, "c": 40}
    jobs = [job(name, steps, 0.2, max=2) for name, steps in names.items()]
    path = write_jobs(tmp_path / "JOBS.yaml", *jobs, gpus=2)
    running = share(path)
    time.sleep(25)
    assert processes_of(path)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    again = share(path, "--resume")  # waits for those that are saving
    time.sleep(15)
    broken = {"name": "broken", "run": f"{sys.executable} -c 'raise SystemExit(3)'"}
    write_jobs(path, *jobs, job("d", 30, 0.1), broken, gpus=2)
    time.sleep(5)
    again.send_signal(signal.SIGTERM)
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 143, output
    assert nothing_is_left(path, within_s=5)
    last = share(path, "--resume")
    output, _ = last.communicate(timeout=300)
    assert last.returncode == 1, output
    assert "broken: failed with exit status 3" in output
    assert nothing_is_left(path, within_s=5)
    assert weights(path, [*names, "d"]) == [{digest_of_one(steps)} for steps in (*names.values(), 30)]
