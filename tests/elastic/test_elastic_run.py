"""`patrickstar elastic run`: jobs of real processes that are resized, killed, stopped and continued."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from patrickstar.cli.main import cli
from patrickstar.elastic.job_directory import JobDirectory
from patrickstar.elastic.supervisor import JobRequest, Supervisor
from patrickstar.errors import ConfigError, StateError
from tests.elastic.running import digest_of_one, digests, running

pytestmark = pytest.mark.slow
TOTAL = 40


@lru_cache(maxsize=1)
def want() -> str:
    return digest_of_one(TOTAL)


def test_a_job_grows_and_shrinks_by_plan_and_by_order(tmp_path: Path) -> None:
    with running(tmp_path / "job", TOTAL, "--min", "1", "--max", "3", "--at", "5:2") as job:
        found = job.wait_for(7, size=2)
        assert len(found["ranks"]) == 2
        job.directory.ask({"do": "resize", "size": 3})
        with pytest.raises(ConfigError, match="4 ranks: this job has 1 to 3"):
            job.directory.ask({"do": "resize", "size": 4})
        with pytest.raises(StateError, match="a job runs in .* already"):
            job.directory.make()
        first = found["ranks"][0]["pid"]
        assert job.wait_for(8, size=3)["ranks"][0]["pid"] == first
        job.process.send_signal(signal.SIGUSR1)
        status, output = job.end()
    assert (status, digests(output)) == (0, {want()}), output
    events = job.events()
    assert [(event["from"], event["to"], event["why"]) for event in events] == [
        (1, 2, "planned"),
        (2, 3, "asked"),
        (3, 1, "signal"),
    ]
    assert events[0]["step"] >= 5  # once the second process has come
    assert all(event["moved_bytes"] <= 1.35 * event["least_bytes"] for event in events)
    assert (tmp_path / "job").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.campaign), 1])
def test_a_job_survives_a_rank_that_is_killed(rank: int, tmp_path: Path) -> None:
    flags = ("--min", "1", "--max", "3", "--size", "2", "--save-every", "5", *["--replace"] * rank)
    with running(tmp_path, TOTAL, *flags) as job:
        os.kill(job.wait_for(8)["ranks"][rank]["pid"], signal.SIGKILL)
        status, output = job.end()
    assert (status, digests(output)) == (0, {want()}), output
    lost, *more = job.events()
    assert (lost["from"], lost["to"], lost["why"]) == (2, 1, f"lost rank {rank} (SIGKILL)")
    assert lost["step"] % 5 == 0
    assert [event["to"] for event in more] == [2] * rank


@pytest.mark.campaign
def test_processes_beside_the_ranks_may_end(tmp_path: Path) -> None:
    """What waits is no rank: the job goes on without it, and comes to its own end. What is asked for before its first step is not forgotten."""
    with running(tmp_path, TOTAL, "--min", "1", "--max", "2", "--warm", "0") as job:
        while not job.status():
            time.sleep(0.02)
        job.directory.ask({"do": "resize", "size": 2})
        job.wait_for(3, size=2)
        job.directory.ask({"do": "resize", "size": 1})
        step = job.wait_for(4, size=1)["step"]
        job.directory.ask({"do": "resize", "size": 2})
        while not (there := job.status()["waiting"]):
            time.sleep(0.02)
        os.kill(there[0], signal.SIGKILL)
        assert job.wait_for(step + 5)["want"] == 1
        status, output = job.end()
    assert (status, digests(output)) == (0, {want()}), output
    assert [event["to"] for event in job.events()] == [2, 1]
    assert "a process that waited has ended (SIGKILL); ranks stay as they are" in output


@pytest.mark.campaign
def test_a_rank_that_is_stopped_counts_as_lost(tmp_path: Path) -> None:
    with running(tmp_path, TOTAL, "--min", "1", "--max", "2", "--size", "2", "--save-every", "5") as job:
        pid = job.wait_for(8)["ranks"][1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        status, output = job.end()
    assert (status, digests(output)) == (0, {want()}), output
    assert [event["why"] for event in job.events()] == ["lost rank 1 (SIGKILL)"]


@pytest.mark.campaign
def test_a_job_without_a_checkpoint_begins_again(tmp_path: Path) -> None:
    with running(tmp_path, TOTAL, "--min", "1", "--max", "2", "--size", "2") as job:
        os.kill(job.wait_for(8)["ranks"][1]["pid"], signal.SIGKILL)
        status, output = job.end()
    assert (status, digests(output)) == (0, {want()}), output
    assert "lost rank 1 (SIGKILL); training begins again, as there is no checkpoint yet" in output


@pytest.mark.campaign
def test_fewer_ranks_than_there_must_be_end_the_job(tmp_path: Path) -> None:
    with running(tmp_path, TOTAL, "--min", "2", "--max", "2", "--save-every", "5") as job:
        os.kill(job.wait_for(8)["ranks"][1]["pid"], signal.SIGKILL)
        status, output = job.end()
    assert status == 1
    newest = JobDirectory(tmp_path).newest_checkpoint
    assert f"1 of at least 2 ranks are left; the newest checkpoint is {newest}" in output


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("send", "number", "says"),
    [(os.kill, signal.SIGTERM, 143), (os.kill, signal.SIGKILL, -signal.SIGKILL), (os.killpg, signal.SIGINT, 130)],
    ids=["the job", "its supervisor", "Ctrl-C"],
)
def test_a_job_that_is_ended_saves_and_goes_on_later(
    send: Callable[[int, int], None], number: int, says: int, tmp_path: Path
) -> None:
    with running(tmp_path, TOTAL, "--min", "1", "--max", "2", "--size", "2") as job:
        pids = [rank["pid"] for rank in job.wait_for(8)["ranks"]]
        for _ in range(2):  # one whose parent ends is told for each of its threads
            send(job.process.pid, number)
            time.sleep(0.1)
        status, _ = job.end()
        assert status == says
        until = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
            time.sleep(0.1)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    newest = job.directory.newest_checkpoint
    assert newest is not None
    assert newest.name >= "step-00000008"
    with running(tmp_path, TOTAL, "--min", "1", "--max", "2", "--warm", "0", seconds=0) as again:
        status, output = again.end()
    assert (status, digests(output)) == (0, {want()}), output


def test_a_job_that_is_ended_before_it_begins_has_not_come_to_its_end(tmp_path: Path) -> None:
    request = JobRequest(command=["true"], least=1, most=2, size=1, warm=1, threads=1, save_every=0)
    job = Supervisor(request, JobDirectory(tmp_path))
    job._on_signal(signal.SIGTERM, None)
    assert job.run() == 143


@pytest.mark.campaign
def test_a_job_that_is_told_to_end_after_its_last_step_has_come_to_its_end(tmp_path: Path) -> None:
    with running(tmp_path, 6, "--max", "2") as job:
        assert job.process.stdout is not None
        next(line for line in job.process.stdout if "digest" in line)
        job.process.send_signal(signal.SIGTERM)
        assert job.end()[0] == 0


def test_what_the_command_refuses(tmp_path: Path) -> None:
    def told(*arguments: str) -> str:
        outcome = CliRunner().invoke(cli, ["elastic", *arguments])
        return f"{outcome.output}{outcome.exception}"

    assert "--min 3 --max 2" in told("run", "--min", "3", "--max", "2", "--", "python")
    assert "--size 5: from 1 to 2 is expected" in told("run", "--size", "5", "--max", "2", "--", "python")
    assert "--at 5:9: STEP:N is expected, with N from 1 to 2" in told(
        "run", "--max", "2", "--at", "5:9", "--", "python"
    )
    assert f"no job runs in {tmp_path}" in told("resize", str(tmp_path), "2")
    assert f"no job runs in {tmp_path}" in told("status", str(tmp_path))
