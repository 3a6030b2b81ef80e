"""The directory beside JOBS.yaml in which it stands how its jobs are: to go on later, and to be told. Only the user can look into it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patrickstar.errors import ConfigError, StateError, nearest


class SharingDirectory:
    """A directory of mode 0700: `state.json`, `events.jsonl`, and a directory for each job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def held(self, *, resume: bool, say: Callable[[str], None]) -> Iterator[int]:
        """A context in which nobody else shares jobs here; gives a descriptor that holds it for the processes that inherit it, too.

        Raises:
            ConfigError: `resume`, and nobody has shared jobs here, or the other way round. StateError: it is another user's.
        """
        if resume != self.path.exists():
            what = "is there already: --resume goes on with it; remove it to begin anew"
            raise ConfigError(f"{self.path} {'is not there: leave --resume out to begin' if resume else what}")
        self.path.mkdir(mode=0o700, exist_ok=True)
        if self.path.stat().st_uid != os.getuid():
            raise StateError(f"{self.path} belongs to another user")
        lock = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting until what runs in {self.path} has ended")  # jobs of one that was killed are saving
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)

    def write(self, state: Mapping[str, Any]) -> None:
        """Writes the state in place of the last one."""
        aside = self.path / "state.json.new"
        aside.write_text(json.dumps(state))
        aside.replace(self.path / "state.json")

    def read(self) -> Any:
        """The state. ConfigError: there is none."""
        try:
            return json.loads((self.path / "state.json").read_text())
        except OSError:
            raise ConfigError(f"{self.path}: no jobs were shared here, as there is no state.json") from None

    def add(self, event: Mapping[str, Any]) -> None:
        """Adds an event."""
        with (self.path / "events.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")

    def events(self) -> tuple[dict[str, Any], ...]:
        """All events, in order of time."""
        return tuple(json.loads(line) for line in (self.path / "events.jsonl").read_text().splitlines())


def explain(state: Mapping[str, Any], name: str | None = None) -> Iterator[str]:
    """A line for each job, or for one, from the state that a dispatcher has written. ConfigError: there is no such job."""
    jobs = {job["of"]["name"]: job for job in state["jobs"]}
    if name is not None and name not in jobs:
        raise ConfigError(f"no job {name!r} here: there are {', '.join(jobs)}{nearest(name, jobs)}")
    holders = [f"{key} has {len(job['gpu_ids'])}" for key, job in jobs.items() if job["gpu_ids"]]
    free = max(0, state["gpus"] - sum(len(job["gpu_ids"]) for job in jobs.values()))
    there = ", ".join([f"{free} of {state['gpus']} are free", *holders])
    for key, job in jobs.items():
        if name in (None, key):
            yield f"{key}: {_of_job(job, state['now'], there)}"


def _of_job(job: Mapping[str, Any], now: float, there: str) -> str:
    of, held = job["of"], len(job["gpu_ids"])
    at = f"step {job['step']}" + (f" of {of['steps']}" if of["steps"] else "")
    if job["finish"] is not None:
        return f"{job['state']} at {job['finish']:.0f} s, at {at}"
    if job["submit"] > now:
        return f"is submitted at {job['submit']:.0f} s, in {job['submit'] - now:.0f} s"

    def left(gpus: int) -> float:
        serial, parallel = job["per_step"]
        return float(job["rest"] * (serial + parallel / gpus))

    if not held:
        least = of["min"]
        return f"waits at {at} for at least {least} GPUs ({job['why']}; {there}); would end {left(least):.0f} s after a start on {least}"
    has = f"{held} GPUs ({', '.join(map(str, job['gpu_ids']))}; {job['why']}), at {at}, ends in {left(held):.0f} s"
    if job["state"] == "stopping":
        return f"{has}; it is saving, as others come first"
    if job["target"] != held:
        return f"{has}; it is to have {job['target']}"
    if of["pinned"] or not job["has_begun"]:
        return f"{has}; it is pinned, or has not come to steps that can be resized"
    if held >= of["max"]:
        return f"{has}; it has its max"
    return f"{has}; one GPU more would bring that forward by {left(held) - left(held + 1):.0f} s"
