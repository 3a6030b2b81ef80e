"""Runs tests against a copy of the library, and says what came of it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from tests.mutants import only_the_copy
from tests.mutants.mutant import ROOT, SOURCE, Mutant
from tests.mutants.operators import MutantError

# A test that fails may leave something behind that its fixtures find: the failure comes first.
_FAILED, _ERROR = (
    re.compile(rf"^{word} (?P<test>tests/.*?)(?: - (?P<reason>.*))?$", re.MULTILINE) for word in ("FAILED", "ERROR")
)
_PASSED, _TESTS_FAILED = 0, 1  # pytest's exit codes; any other means that it did not get to run the tests


@dataclass(frozen=True, slots=True)
class Run:
    """One run of pytest. `code` is None where it was stopped for taking too long."""

    code: int | None
    output: str
    seconds: float

    @property
    def green(self) -> bool:
        """Whether every test was run and passed."""
        return self.code == _PASSED and not re.search(r"\b\d+ (?:skipped|xfailed|xpassed|deselected)\b", self.output)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        caught: whether a test noticed it. by: which one. seconds: how long that took. reason: in the test's words.
    """

    caught: bool
    by: str
    seconds: float
    reason: str = ""


def judge(run: Run) -> Verdict:
    """The verdict on the mutant that a run was made with."""
    if run.code is None:
        return Verdict(True, "a HANG", run.seconds)
    if run.code == _PASSED:
        return Verdict(False, "nothing: it SURVIVED", run.seconds)
    found = _FAILED.search(run.output) or _ERROR.search(run.output)
    if run.code != _TESTS_FAILED or found is None:
        return Verdict(
            False, f"nothing: its tests did NOT RUN (pytest's exit code {run.code})", run.seconds, run.output[-4000:]
        )
    return Verdict(True, found["test"], run.seconds, found["reason"] or "")


@contextmanager
def copy_of_the_library(original: Path = SOURCE) -> Iterator[Path]:
    """A directory to put on the search path, with a copy of the package; `original`: the package to copy."""
    with tempfile.TemporaryDirectory(prefix="patrickstar-mutant-") as name:
        shutil.copytree(original, Path(name) / SOURCE.name)
        yield Path(name)


def run_mutant(mutant: Mutant, unspoiled: Path, *, limit_s: float) -> Verdict:
    """Runs a mutant's tests against a copy that has its fault. `unspoiled`: where a copy lies that has none."""
    with copy_of_the_library(unspoiled / SOURCE.name) as copy:
        target = copy / SOURCE.name / mutant.file
        try:
            target.write_text(mutant.applied_to(target.read_text()))
        except MutantError as error:
            return Verdict(False, "nothing: it is NO MUTANT", 0.0, str(error))
        # Compiled code is known by size and second of change, which a mutant may share with what it spoils.
        Path(cache_from_source(str(target))).unlink(missing_ok=True)
        return judge(run_tests(mutant.tests, copy, limit_s=limit_s))


def apart(tests: Sequence[str]) -> tuple[list[str], list[str]]:
    """The tests without those that need a device, and those: which has to be loaded before torch."""
    with_device = [test for test in tests if test.startswith("tests/cuda/")]
    return [test for test in tests if test not in with_device], with_device


def run_tests(tests: Sequence[str], copy: Path, *, limit_s: float | None = None) -> Run:
    """Runs tests against the package in `copy`, up to the first that fails."""
    path = os.pathsep.join(filter(None, (str(copy), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        only_the_copy.VARIABLE: str(copy),
        # Examples that fail on a mutant are none to remember.
        "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / "hypothesis"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "400",  # reasons are not cut
    }
    plugin = only_the_copy.__name__
    device = ["-p", "tests.accelerator.plugin"] if apart(tests)[1] else []
    options = ["-x", "-q", "-p", "no:cacheprovider", *device, "-p", plugin, "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that what the tests start ends with them
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return Run(None, output, time.perf_counter() - began)
    return Run(process.returncode, output, time.perf_counter() - began)
