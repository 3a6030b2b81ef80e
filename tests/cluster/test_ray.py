"""`patrickstar cluster ray`: jobs on nodes that come and go, three of them on this machine; and what is refused, without Ray."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patrickstar.cli.main import main
from patrickstar.elastic.job_directory import JobDirectory
from patrickstar.elastic.ray_cluster import NodeProcess
from patrickstar.errors import ConfigError
from patrickstar.sharing.jobs_file import read_jobs
from patrickstar.sharing.live_job import Standing
from patrickstar.sharing.sharing_directory import SharingDirectory
from tests.cluster.shared_jobs import FakeExecutor, dispatcher, write_jobs
from tests.cluster.shared_jobs import job as numbers
from tests.cluster.test_share import job, nothing_is_left, weights
from tests.elastic.running import ENVIRONMENT, SOURCE, digest_of_one

WITHOUT = (
    "import sys; sys.modules['ray'] = None; from patrickstar.cli.main import main; raise SystemExit(main(sys.argv[1:]))"
)

PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def run(*words: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, *words], env=ENVIRONMENT, cwd=SOURCE, check=False, **PIPES)
    return done.returncode, done.stdout


def test_help_needs_no_ray_and_without_it_a_sentence_says_how_to_get_it(tmp_path: Path) -> None:
    path = write_jobs(tmp_path / "JOBS.yaml", numbers("a"))
    assert run("-c", WITHOUT, "cluster", "ray", "--help")[0] == 0
    status, told = run("-c", WITHOUT, "cluster", "ray", str(path))
    assert status == 2
    assert told == "patrickstar: ConfigError: jobs on a Ray cluster need Ray: pip install 'patrickstar[ray]'\n"
    assert not path.with_suffix(".share").exists()


@pytest.mark.parametrize("text", ["rank", "[1]", "{}", '{"rank": 0}', '{"rank": "many"}', '{"rank": Infinity}'])
def test_what_are_no_resources_is_said(text: str, tmp_path: Path, capsys) -> None:
    assert main(["cluster", "ray", str(tmp_path / "JOBS.yaml"), "--resources", text]) == 2
    assert f"--resources {text}: what a rank takes of a node is expected, such as" in capsys.readouterr().err


def test_a_file_without_gpus_is_for_all_that_nodes_have(tmp_path: Path) -> None:
    path = tmp_path / "JOBS.yaml"
    path.write_text("jobs: [{name: a, run: a, min: 9, max: 99}]")
    gpus, (found,) = read_jobs(path, otherwise=1000)
    assert (gpus, found.min, found.max) == (1000, 9, 99)
    path.write_text("gpus: 20\n" + path.read_text())
    gpus, (found,) = read_jobs(path, otherwise=1000)
    assert (gpus, found.max) == (20, 20)


@dataclass
class FakeNodes(FakeExecutor):
    """Slots that come and go by a plan. Jobs lose those that are gone a while later, and too many of them end a job with 75."""

    plan: dict[float, int] = field(default_factory=dict)
    always_lost: bool = False
    lags_s: float = 2.0
    shrunk_at: float = 0.0
    held: int = 0

    def wait(self, seconds: float) -> None:
        if (there := self.plan.pop(self.now + seconds, self.gpus)) != self.gpus:
            self.gpus, self.shrunk_at = there, self.now
        if self.now >= self.shrunk_at + self.lags_s:
            for name, one in self.runs.items():
                while one.gpu_ids and sum(len(each.gpu_ids) for each in self.runs.values()) > self.gpus:
                    one.gpu_ids = one.gpu_ids[1:]
                if len(one.gpu_ids) < self.jobs[name].min or (self.always_lost and self.status(name).has_begun):
                    one.ends = self.now, 75
        super().wait(seconds)

    def expect_no_slot_twice(self) -> None:
        held = [gpu for one in self.runs.values() for gpu in one.gpu_ids]
        assert len(held) == len(set(held)) <= max(self.gpus, self.held)  # no more than there are, once some are gone
        self.held = len(held)

    def status(self, name: str) -> Standing:
        standing = super().status(name)
        return standing if standing.gpu_ids or standing.exit_status is not None else Standing(gpu_ids=(0,))


@pytest.mark.parametrize("policy", ["fifo", "las", "srtf", "optimus", "pollux", "ones", "soonest"])
def test_jobs_follow_the_slots_that_are_there(policy: str, tmp_path: Path) -> None:
    jobs = [
        numbers("a", steps=300, max=4),
        numbers("b", steps=60, min=2, max=2),
        numbers("c", steps=40, submit=39, max=3),
    ]
    path = write_jobs(tmp_path / "JOBS.yaml", *jobs, gpus=8)
    nodes = FakeNodes(1, plan={20.0: 6, 40.0: 2, 60.0: 0, 70.0: 1, 90.0: 4})
    made, told = dispatcher(path, policy, executor=nodes)
    made.limit = 8
    made.run()
    assert {one.state for one in made.jobs.values()} == {"done"}, told
    assert sum("GPUs are there now" in line for line in told) == 6
    held = [event for event in made.directory.events() if event["t"] < 20]
    assert all(len(event["gpus"]) <= 1 for event in held)
    assert max(nodes.seen["a"]) > 1
    assert made.outcome().cluster.gpus >= 4


def test_one_that_is_lost_again_and_again_fails(tmp_path: Path) -> None:
    nodes = FakeNodes(2, always_lost=True)
    made, told = dispatcher(write_jobs(tmp_path / "JOBS.yaml", numbers("a", steps=50), gpus=2), executor=nodes)
    nodes.steps["a"] = 7.0
    made.run()
    assert made.jobs["a"].state == "failed"
    assert sum("waits to go on" in line for line in told) >= 3
    assert told[-1].endswith("failed with exit status 75")


class FakeRay:
    """Ray and an actor, which gives the answers that stand here."""

    exceptions = SimpleNamespace(RayTaskError=KeyError, RayError=OSError)

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> Any:  # of the actor: `start`, `look`, `signal`
        return SimpleNamespace(remote=lambda *of: self.told.append((name, *of)))

    def wait(self, refs: Sequence[Any], *, timeout: float) -> tuple[Sequence[Any], Sequence[Any]]:
        return (refs, ()) if self.answers else ((), refs)

    def get(self, ref: Any) -> Any:
        if isinstance(answer := self.answers.pop(0), Exception):
            raise answer
        return answer

    def kill(self, actor: Any) -> None:
        self.told.append("kill")


def test_a_rank_is_lost_without_a_place_without_an_answer_and_by_an_error(capfd) -> None:
    runs, of = (7, None, 0.0, "[1] so far\n", ""), (["a"], 5, 1, {})
    waits, silent, errs, ends = (NodeProcess(ray := FakeRay(), ray, of) for _ in range(4))
    assert (waits.status, waits.stopped_s(), waits.pid, waits.slot) == (None, 0.0, 0, 1)
    waits._asked_at -= 31
    assert waits.status == -signal.SIGKILL
    assert "[1] patrickstar: lost: no node has had a place for it for 30 s" in capfd.readouterr().err
    for one, then in ((silent, []), (errs, [OSError("of its own\nnode gone")]), (ends, [(7, 3, 0.0, "", "oh\n")])):
        one._ray.answers += [runs, *then]
        assert (one.status, one.pid) == (None, 7)
        one.signal(signal.SIGTERM)
        assert one._ray.told[1:] == [("look",), ("signal", signal.SIGTERM)]
    silent._asked_at -= 11
    assert silent.stopped_s() > 10
    silent.signal(signal.SIGKILL)
    assert [one.status for one in (silent, errs, ends)] == [-9, -9, 3]
    assert all(one._ray.told[-1] == "kill" for one in (waits, silent, errs, ends))
    out, err = capfd.readouterr()
    assert out == 3 * "[1] so far\n"
    assert err == "[1] patrickstar: lost: its actor or its node is gone (OSError: node gone)\noh\n"


# on nodes of this machine


NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of processes of this machine, the first of which has no place for a rank."""
    utils = pytest.importorskip("ray.cluster_utils")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray") as folder:
        given = {"RAY_TMPDIR": folder, "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_USAGE_STATS_ENABLED": "0"}
        for name, value in {**ENVIRONMENT, **given}.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        cluster = utils.Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            yield cluster
        finally:
            cluster.shutdown()


@dataclass
class OnNodes:
    """`cluster ray` that runs, as its state says."""

    process: subprocess.Popen[str]
    directory: SharingDirectory

    def wait_for(self, is_so: Callable[[Any, Mapping[str, Any]], bool], within_s: float = 60.0) -> None:
        """Returns when something is so of the state and its jobs by name."""
        state, until = None, time.monotonic() + within_s
        while time.monotonic() < until and self.process.poll() is None:
            with suppress(ConfigError):
                state = self.directory.read()
                if is_so(state, {one["of"]["name"]: one for one in state["jobs"]}):
                    return
            time.sleep(0.1)
        raise AssertionError(f"it is {state}")

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=100)
        return self.process.returncode, output


@contextmanager
def on(nodes: Any, path: Path, *flags: str, resource: str = "rank") -> Iterator[OnNodes]:
    given = ["--address", nodes.address, "--resources", json.dumps({resource: 1}), *flags]
    words = [sys.executable, "-m", "patrickstar", "cluster", "ray", str(path), *given]
    process = subprocess.Popen(words, env=ENVIRONMENT, cwd=SOURCE, **PIPES)
    try:
        yield OnNodes(process, SharingDirectory(path.with_suffix(".share")))
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


@pytest.mark.campaign
def test_jobs_grow_onto_nodes_that_join_and_survive_those_that_die(nodes: Any, tmp_path: Path) -> None:
    steps = {"a": 150, "b": 60}
    a, b = job("a", 150, 0.3, max=3), job("b", 60, 0.2, min=2, max=2)
    path = write_jobs(tmp_path / "JOBS.yaml", a, gpus=3)
    nodes.add_node(**NODE, resources={"rank": 1})
    with on(nodes, path, "--report", str(tmp_path / "r.html")) as running:
        running.wait_for(lambda state, jobs: jobs["a"]["step"] >= 2)
        first = nodes.add_node(**NODE, resources={"rank": 2})
        running.wait_for(lambda state, jobs: 3 in map(int, jobs["a"]["measured"]))
        nodes.remove_node(first, allow_graceful=False)
        running.wait_for(lambda state, jobs: len(jobs["a"]["gpu_ids"]) == 1)
        running.wait_for(lambda state, jobs: state["gpus"] == 1)
        write_jobs(path, a, b, gpus=3)
        running.wait_for(lambda state, jobs: "b" in jobs and jobs["b"]["why"] == "there are only 1 GPUs")
        second = nodes.add_node(**NODE, resources={"rank": 2})
        running.wait_for(lambda state, jobs: jobs["b"]["step"] >= 2)
        nodes.remove_node(second, allow_graceful=False)
        running.wait_for(lambda state, jobs: jobs["b"]["losses"])
        nodes.add_node(**NODE, resources={"rank": 2})
        status, output = running.end()
    assert status == 0, output
    assert nothing_is_left(path, within_s=5)
    assert weights(path, [*steps]) == [{digest_of_one(each)} for each in steps.values()]
    log = (running.directory.path / "a" / "log.jsonl").read_text()
    grown, lost = (json.loads(line) for line in log.splitlines()[:2])
    assert (grown["from"], grown["to"]) == (1, 3)
    assert (lost["from"], lost["to"]) == (3, 1)
    assert {"lost rank 1 (SIGKILL)", "lost rank 2 (SIGKILL)"} == set(lost["why"].split(", "))
    assert "b: has lost too many ranks with their nodes" in output
    assert "b" in (tmp_path / "r.html").read_text()


@pytest.mark.campaign
def test_killed_it_is_resumed_with_what_its_jobs_have_saved(nodes: Any, tmp_path: Path) -> None:
    path = write_jobs(tmp_path / "JOBS.yaml", job("a", 40, 0.2), gpus=1)
    nodes.add_node(**NODE, resources={"own": 1})
    with on(nodes, path, resource="own") as running:
        running.wait_for(lambda state, jobs: jobs["a"]["step"] >= 5)
        running.process.kill()
        assert running.end()[0] == -signal.SIGKILL
    assert nothing_is_left(path)
    assert JobDirectory(running.directory.path / "a").newest_checkpoint.name >= "step-00000005"
    with on(nodes, path, "--resume", resource="own") as again:
        status, output = again.end()
    assert status == 0, output
    assert nothing_is_left(path, within_s=5)
    assert weights(path, ["a"]) == [{digest_of_one(40)}]


@pytest.mark.campaign
def test_a_node_with_another_torch_and_a_cluster_that_is_not_there_are_refused(nodes: Any, tmp_path: Path) -> None:
    (tmp_path / "torch-0.1.dist-info").mkdir()
    (tmp_path / "torch-0.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 0.1\n")
    found = {"PYTHONPATH": f"{tmp_path}:{ENVIRONMENT['PYTHONPATH']}"}
    path = write_jobs(tmp_path / "JOBS.yaml", job("a", 5, 0), gpus=1)
    nodes.add_node(**NODE, resources={"odd": 1}, env_vars=found)
    with on(nodes, path, resource="odd") as running:
        status, output = running.end()
    assert status == 1, output
    assert "a: failed with exit status 2" in output
    told = (running.directory.path / "a" / "output").read_text()
    assert re.search(r"ConfigError: node [\d.]+ has torch 0.1 and not \d", told), told
    status, told = run("-m", "patrickstar", "cluster", "ray", str(path), "--address", "127.0.0.1:9")
    assert status == 2
    assert "no Ray cluster at 127.0.0.1:9 (ConnectionRefusedError" in told
