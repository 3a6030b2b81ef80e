"""The process of a rank on a node of a Ray cluster: an actor that has it there, and what a supervisor elsewhere sees of it."""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeAlias

from patrickstar.elastic.rank_process import RankProcess
from patrickstar.errors import ConfigError

Look: TypeAlias = tuple[int, int | None, float, str, str]
"""A process's number, status and seconds stopped, and what it has written since the last look, to both of its streams."""

_LOOKS_S: Final = 0.1
_PLACED_S: Final = 30.0  # after that no node has the place that was counted


class NodeActor(RankProcess):
    """A rank, as an actor that has it as a process of its node. It ends at once where the actor does: what is lost is lost."""

    ends_by = signal.SIGKILL

    def __init__(self) -> None:
        self._streams = _Written(), _Written()

    def start(self, *of: Any, seen: Sequence[Path], torch_version: str) -> Look:
        """Starts it in the first of these paths. ConfigError: the node does not see all of them, or has another version of torch."""
        import psutil  # noqa: PLC0415  (extras, which nodes have)
        from ray.util import get_node_ip_address  # noqa: PLC0415

        address, here = get_node_ip_address(), version("torch")
        if here != torch_version:
            raise ConfigError(f"node {address} has torch {here} and not {torch_version}: have one version on all nodes")
        for path in seen:
            if not path.exists():
                raise ConfigError(f"node {address} does not see {path}: begin in storage that all nodes share")
        os.chdir(seen[0])
        # Not told, gloo takes the network of the machine's name, which may be the loopback.
        networks = [name for name, has in psutil.net_if_addrs().items() if address in {one.address for one in has}]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", ",".join(networks))
        with redirect_stdout(self._streams[0]), redirect_stderr(self._streams[1]):  # type: ignore[type-var]
            super().__init__(*of)
        return self.look()

    def look(self) -> Look:
        """The process, after a moment."""
        time.sleep(_LOOKS_S)
        status, stopped_s = self.status, self.stopped_s()
        written, errors = ("".join(each.get() for _ in range(each.qsize())) for each in self._streams)
        return self.pid, status, stopped_s, written, errors


class _Written(queue.SimpleQueue[str]):
    write = queue.SimpleQueue.put

    def flush(self) -> None:
        pass


class NodeProcess:
    """A rank on a node, as a `RankProcess`. Where its actor is gone or does not answer it is lost, and ended: it never comes again.

    Args:
        ray: the module. actor: a `NodeActor`, for which a node has a place, now or in a while. of: what it is to start.
    """

    def __init__(self, ray: Any, actor: Any, of: Sequence[Any], **more: Any) -> None:
        _, self.member, self.slot, _ = of
        self.pid, self._ray, self._actor = 0, ray, actor
        self._answer, self._asked_at, self._stopped_s = actor.start.remote(*of, **more), time.monotonic(), 0.0
        self._status: int | None = None

    @property
    def status(self) -> int | None:
        """The exit status, a signal's number with a minus; None while it runs. ConfigError: its node cannot run it."""
        if self._status is None and self._ray.wait([self._answer], timeout=0)[0]:
            self._take()
        elif self._status is None and not self.pid and time.monotonic() - self._asked_at > _PLACED_S:
            self._lose(f"no node has had a place for it for {_PLACED_S:g} s")
        return self._status

    def _take(self) -> None:
        try:
            self.pid, self._status, self._stopped_s, *texts = self._ray.get(self._answer)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            self._lose(f"its actor or its node is gone ({type(error).__name__}: {str(error).rpartition(chr(10))[2]})")
            return
        for stream, text in zip((sys.stdout, sys.stderr), texts, strict=True):
            stream.write(text)
            stream.flush()
        # One that has ended leaves its place.
        self._answer = self._actor.look.remote() if self._status is None else self._ray.kill(self._actor)
        self._asked_at = time.monotonic()

    def stopped_s(self) -> float:
        """Seconds since it was first seen not to run, stopped by a signal, or since its actor was asked and has not answered."""
        silent_s = time.monotonic() - self._asked_at if self.status is None and self.pid else 0.0
        return max(self._stopped_s, silent_s)

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal, unless it has ended. One that has not begun is ended."""
        if self._status is None and self.pid and number != signal.SIGKILL:
            self._actor.signal.remote(number)
        elif self._status is None:
            self._ray.kill(self._actor)
            self._status = -signal.SIGKILL

    def _lose(self, why: str) -> None:
        print(f"[{self.slot}] patrickstar: lost: {why}", file=sys.stderr, flush=True)  # noqa: T201
        self.signal(signal.SIGKILL)
