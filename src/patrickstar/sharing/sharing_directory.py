"""The directory beside JOBS.yaml in which it stands how its jobs are: to go on later, and to be asked. Only the user can look into it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patrickstar.errors import ConfigError, StateError


class SharingDirectory:
    """A directory of mode 0700: `state.json`, `events.jsonl`, and the directory and output of each job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def held(self, *, resume: bool) -> Iterator[int]:
        """A context in which nobody else shares jobs here; gives a descriptor that holds it for the processes that inherit it, too.

        Raises:
            ConfigError: there has been one, and `resume` is not given; or the other way round. StateError: another one is there.
        """
        if resume and not self.path.exists():
            raise ConfigError(f"--resume: there is no {self.path}; leave it out to begin")
        if not resume and self.path.exists():
            raise ConfigError(f"{self.path} is there already: --resume goes on with it; remove it to begin anew")
        self.path.mkdir(mode=0o700, exist_ok=True)
        if self.path.stat().st_uid != os.getuid():
            raise StateError(f"{self.path} belongs to another user")
        lock = os.open(self.path, os.O_RDONLY)
        try:
            # Jobs of one that was killed are saving, and then end: they have the lock as well.
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)

    def write(self, state: Mapping[str, Any]) -> None:
        """Writes the state in place of the last one."""
        aside = self.path / "state.json.new"
        aside.write_text(json.dumps(state))
        aside.replace(self.path / "state.json")

    def read(self) -> dict[str, Any]:
        """The state. ConfigError: no jobs are shared here."""
        try:
            return dict(json.loads((self.path / "state.json").read_text()))
        except FileNotFoundError:
            raise ConfigError(f"{self.path}: no jobs were shared here (there is no state.json)") from None

    def add(self, event: Mapping[str, Any]) -> None:
        """Adds an event."""
        with (self.path / "events.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")

    def events(self) -> tuple[dict[str, Any], ...]:
        """All events, in order of time."""
        path = self.path / "events.jsonl"
        return tuple(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else ()
