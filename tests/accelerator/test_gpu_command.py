"""`python -m tests.gpu`, with the test device in the place of a GPU: stages, results and what is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Loaded by every Python that has its folder on its path, before anything else.
BEFORE_TORCH = """
from tests.accelerator import cuda
from patrickstar.memory import driver
driver._driver = lambda: cuda.DRIVER
"""


def run(*arguments: str, path: Path, module: str = "tests.gpu") -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, (path, ROOT / "src", ROOT)))
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True, text=True, cwd=ROOT, check=False, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


def test_without_a_gpu_it_says_that_nothing_is_tested(tmp_path: Path) -> None:
    done = run(path=tmp_path)
    assert done.returncode == 2
    assert "NOT TESTED: torch" in done.stderr


@pytest.mark.parametrize("module", ["tests.gpu", "benchmarks.gpu"])
def test_a_python_without_torch_is_named(module: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.path[:] = [path for path in sys.path if not path.endswith('-packages')]\n"
    )
    done = run(path=tmp_path, module=module)
    assert done.returncode == 2
    assert f"{sys.executable} has no torch; `make " in done.stderr


def test_a_stage_that_is_not_known_is_refused(tmp_path: Path) -> None:
    done = run("trops", path=tmp_path)
    assert done.returncode == 2
    assert "no such stage: trops; there are traps, bits, memory, faults, ranks, rows" in done.stderr


@pytest.mark.campaign
def test_a_stage_runs_and_each_test_leaves_a_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BEFORE_TORCH)
    chosen = "stream_has_a_number or mapping_does_not_wait or two_streams_use_neighbours"
    done = run("--out", str(tmp_path), "traps", "--", "-n", "0", "-m", "not device_only", "-k", chosen, path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "traps: 2 passed in" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {(line["stage"], line["outcome"]) for line in lines} == {("traps", "passed")}
    assert "2 passed" in (tmp_path / "traps.log").read_text()


@pytest.mark.slow
def test_a_test_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    """A kernel that takes its time is what the test device lacks: a test that needs one fails there, and the others pass."""
    (tmp_path / "sitecustomize.py").write_text(BEFORE_TORCH)
    chosen = "waiting_on_the_device_keeps_no_thread or stream_has_a_number"
    done = run("--out", str(tmp_path), "traps", "--", "-n", "0", "-k", chosen, path=tmp_path)
    assert done.returncode == 1
    assert "traps: 1 failed, 1 passed in" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert sorted((line["stage"], line["outcome"]) for line in lines) == [("traps", "failed"), ("traps", "passed")]
    assert "gpu/test_assumptions.py::test_waiting_on_the_device_keeps_no_thread_waiting: " in done.stdout
