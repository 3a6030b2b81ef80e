"""The process of a rank: the user's program, with what it has to know in its environment. It ends with its supervisor."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Final

_PR_SET_PDEATHSIG: Final = 1
_LOOPBACK: Final = "lo" if sys.platform == "linux" else "lo0"


class RankProcess:
    """A process of a job. `member`: its number in it, which no other process of the job ever has. `slot`: its place on the machine."""

    ends_by = signal.SIGTERM  # where its parent does

    def __init__(self, command: Sequence[str], member: int, slot: int, environment: Mapping[str, str]) -> None:
        self.member, self.slot = member, slot
        own = {"RANK": str(member), "LOCAL_RANK": str(slot)}
        self._process = subprocess.Popen(  # noqa: S603  (the program that the user gave)
            command,
            env={"GLOO_SOCKET_IFNAME": _LOOPBACK, **os.environ, **environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the supervisor, which has them save
            preexec_fn=partial(end_with_parent, self.ends_by),  # noqa: PLW1509  (one call of the system)
        )
        self._stopped_at: float | None = None
        streams = (self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)
        self._readers = [
            threading.Thread(target=_forward, args=(stream, to, f"[{slot}] "), daemon=True) for stream, to in streams
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, a signal's number with a minus; None while it runs."""
        status = self._process.poll()
        if status is not None:
            for reader in self._readers:
                reader.join(1.0)
        return status

    def stopped_s(self) -> float:
        """Seconds since it was first seen not to run, stopped by a signal; 0 where it runs."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = ""
        if state not in "tT" or not state:
            self._stopped_at = None
            return 0.0
        self._stopped_at = self._stopped_at or time.monotonic()
        return time.monotonic() - self._stopped_at

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal, unless it has ended."""
        if self._process.poll() is None:
            self._process.send_signal(number)


def threads_of(most: int) -> int:
    """Threads of each rank, at every size: the cores that this process may use, over the most ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // most)


def end_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Has a process that is about to begin be told to end when the one that has started it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(by))


def _forward(stream: IO[bytes] | None, to: IO[str], prefix: str) -> None:
    assert stream is not None
    for line in iter(stream.readline, b""):
        to.write(prefix + line.decode(errors="replace"))
        to.flush()
