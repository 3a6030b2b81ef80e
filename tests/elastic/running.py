"""Jobs under `patrickstar elastic run`, as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from patrickstar.elastic.job_directory import JobDirectory
from patrickstar.errors import StateError

SOURCE = Path(__file__).parents[2]
PATHS = os.environ.get("PYTHONPATH", f"{SOURCE}"), f"{SOURCE}/src", f"{SOURCE}"
ENVIRONMENT = {**os.environ, "PYTHONPATH": ":".join(PATHS), "OMP_NUM_THREADS": "1"}


def program(total: int, *arguments: float) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "tests.elastic.program", str(total), *map(str, arguments)]


def digests(output: str) -> set[str]:
    return {line.rpartition(" ")[2] for line in output.splitlines() if "digest " in line}


def digest_of_one(total: int) -> str:
    """What one process by itself comes to."""
    done = subprocess.run(program(total, 0), env=ENVIRONMENT, cwd=SOURCE, capture_output=True, text=True, check=True)
    (found,) = digests(done.stdout)
    return found


class Running:
    """A job that runs in a directory."""

    def __init__(
        self, directory: Path, total: int, *flags: str, seconds: float = 0.1, max_batch: Sequence[int] = ()
    ) -> None:
        self.directory = JobDirectory(directory)
        command = [sys.executable, "-m", "patrickstar", "elastic", "run", "--threads", "1", "--job-dir", str(directory)]
        self.process = subprocess.Popen(
            [*command, *flags, "--", *program(total, seconds, *max_batch)],
            env=ENVIRONMENT,
            cwd=SOURCE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def status(self) -> dict[str, Any]:
        """How it stands; nothing where it does not run."""
        with suppress(StateError):
            return dict(self.directory.ask({"do": "status"}))
        return {}

    def wait_for(self, step: int, *, size: int | None = None, within_s: float = 60.0) -> dict[str, Any]:
        """How it stands once it has come to a step, with so many ranks."""
        until = time.monotonic() + within_s
        while time.monotonic() < until and self.process.poll() is None:
            found = self.status()
            if found and found["step"] >= step and size in (None, found["size"]):
                return found
            time.sleep(0.05)
        raise AssertionError(f"it has not come to step {step} with {size} ranks: {self.status()}")

    def end(self, within_s: float = 90.0) -> tuple[int, str]:
        """Its exit status and output."""
        output, _ = self.process.communicate(timeout=within_s)
        return self.process.returncode, output

    def events(self) -> list[dict[str, Any]]:
        """The lines of its log."""
        log = self.directory.path / "log.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@contextmanager
def running(directory: Path, total: int, *flags: str, **more: Any) -> Iterator[Running]:
    """A job, of which nothing is left afterwards."""
    job = Running(directory, total, *flags, **more)
    try:
        yield job
    finally:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)
            job.process.send_signal(signal.SIGTERM)
            job.process.communicate(timeout=30)
