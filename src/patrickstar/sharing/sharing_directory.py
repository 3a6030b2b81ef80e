"""The directory beside JOBS.yaml in which it stands how its jobs are: to go on later, and to be asked. Only the user can look into it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patrickstar.errors import ConfigError, StateError


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
