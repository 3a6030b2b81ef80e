"""The directory of a job: a socket that takes orders, a log, checkpoints. Only the user who has made it can look into it."""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from patrickstar.errors import ConfigError, StateError

_ANSWERS_S: Final = 30.0
_MOST_BYTES: Final = 1 << 16


class JobDirectory:
    """A directory of mode 0700. Orders are lines of JSON, and so are answers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def newest_checkpoint(self) -> Path | None:
        """The newest checkpoint that is complete, if there is one."""
        latest = self.path / "checkpoints" / "latest"
        return latest.parent / latest.read_text().strip() if latest.exists() else None

    def make(self) -> None:
        """Makes the directory. StateError: it is another user's, or a job runs in it."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.stat().st_uid != os.getuid():
            raise StateError(f"{self.path} belongs to another user: give a --job-dir of your own")
        self.path.chmod(0o700)
        try:
            self.ask({"do": "status"})
        except StateError:
            return
        raise StateError(f"a job runs in {self.path} already: `patrickstar elastic status {self.path}`")

    def ask(self, order: Mapping[str, Any]) -> Any:
        """The answer of the job that runs here. StateError: none does, or it is another user's. ConfigError: it has refused."""
        with closing(socket.socket(socket.AF_UNIX)) as connection:
            connection.settimeout(_ANSWERS_S)
            try:
                with _short(self.path) as folder:
                    connection.connect(f"{folder}/socket")
                connection.sendall(json.dumps(order).encode() + b"\n")
                with connection.makefile() as lines:
                    text = lines.readline(_MOST_BYTES)
            except PermissionError:
                raise StateError(f"{self.path} belongs to another user") from None
            except OSError as error:
                raise StateError(f"no job runs in {self.path}, or it does not answer ({error})") from None
        if not text:
            raise StateError(f"the job in {self.path} has ended")
        if "error" in (answer := json.loads(text)):
            raise ConfigError(answer["error"])
        return answer

    @contextmanager
    def taking_orders(self, carry_out: Callable[[Any], Mapping[str, Any]]) -> Iterator[Callable[[float], None]]:
        """A context in which orders are taken, by whoever calls what it gives, with the seconds to wait for one."""
        (self.path / "socket").unlink(missing_ok=True)
        with closing(socket.socket(socket.AF_UNIX)) as listening, selectors.DefaultSelector() as ready:
            with _short(self.path) as folder:
                listening.bind(f"{folder}/socket")
            listening.listen()
            ready.register(listening, selectors.EVENT_READ)

            def serve(seconds: float) -> None:
                until = time.monotonic() + seconds
                while ready.select(max(0.0, until - time.monotonic())):
                    connection, _ = listening.accept()
                    with closing(connection), suppress(OSError):
                        connection.settimeout(1.0)
                        with connection.makefile() as lines:
                            answer = _answer(lines.readline(_MOST_BYTES), carry_out)
                        connection.sendall(json.dumps(answer).encode() + b"\n")

            try:
                yield serve
            finally:
                (self.path / "socket").unlink(missing_ok=True)


def _answer(line: str, carry_out: Callable[[Any], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return carry_out(json.loads(line))
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        return {"error": f"{error}"}


@contextmanager
def _short(folder: Path) -> Iterator[str]:
    """A path of a directory that is short enough for the address of a socket."""
    if len(os.fsencode(folder)) < 90:
        yield str(folder)
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
