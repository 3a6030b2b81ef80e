"""A Ray cluster, whose nodes have places for ranks. Ray is an extra, imported where somebody asks for a cluster.

RayCluster ── start ──> NodeProcess, as a supervisor sees it ──> NodeActor, which has it on its node
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from patrickstar.elastic.rank_process import RankProcess
from patrickstar.errors import ConfigError

Look: TypeAlias = tuple[int, int | None, float, str, str]
"""A process's number, status and seconds stopped, and what it has written since the last look, to both of its streams."""

_OPTIONS: Final = MappingProxyType({"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"})
_ANSWERS_S: Final = 5.0
_LOOKS_S: Final = 0.1
_PLACED_S: Final = 30.0  # after that no node has the place that was counted


class RayCluster:
    """A cluster that this process is connected to, on one of its nodes.

    Args:
        address: as `ray start --head` has said it; None: that of RAY_ADDRESS, or of the cluster that this machine is in.
        resources: that a rank takes of a node, in JSON; None: a GPU.
    Attributes:
        host: where its nodes find this one. flags: of `elastic run`, for a job on this cluster.
    Raises:
        ConfigError: these are no resources, Ray is not installed, nobody answers there, or Ray refuses.
    """

    def __init__(self, address: str | None, resources: str | None) -> None:
        self._need = _resources(resources or '{"GPU": 1}')
        try:
            import ray  # noqa: PLC0415  (an extra)
        except ImportError:
            raise ConfigError("jobs on a Ray cluster need Ray: pip install 'patrickstar[ray]'") from None
        where, handler = address or os.environ.get("RAY_ADDRESS") or "auto", signal.getsignal(signal.SIGTERM)
        try:
            _expect_listener(where)
            ray.init(address=where, log_to_driver=False, logging_level="ERROR")
        except Exception as error:
            what = f"no Ray cluster at {where} ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
            raise ConfigError(f"{what}: give --address HOST:PORT of one, or begin it: `ray start --head`") from error
        finally:
            signal.signal(signal.SIGTERM, handler)  # Ray has one of its own
        self._ray, self.host = ray, str(ray.util.get_node_ip_address())
        self.flags = {"--ray": ray.get_runtime_context().gcs_address, "--resources": json.dumps(self._need)}
        options: dict[str, Any] = {_OPTIONS[name]: need for name, need in self._need.items() if name in _OPTIONS}
        named = {name: need for name, need in self._need.items() if name not in _OPTIONS}
        self._actors = ray.remote(NodeActor).options(
            **{"num_cpus": 0, "max_restarts": 0, "resources": named, **options}
        )

    @property
    def gpus(self) -> int:
        """Places for ranks on all nodes that are there now."""
        return sum(places for places, _ in self._nodes())

    @property
    def threads(self) -> int:
        """Threads of a rank, where there are fewest cores for each."""
        return max(1, min((int(cores // places) for places, cores in self._nodes() if places), default=1))

    def _nodes(self) -> list[tuple[int, float]]:
        """Places and cores of each node."""
        there = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        # 0.1 goes ten times into 1.
        places = [min(int(has.get(name, 0) / need + 1e-6) for name, need in self._need.items()) for has in there]
        return [(found, has.get("CPU", 1)) for found, has in zip(places, there, strict=True)]

    def start(self, command: Sequence[str], member: int, slot: int, environment: Mapping[str, str]) -> NodeProcess:
        """A rank, in the directory of this process, on a node that has a place for it, now or in a while."""
        from patrickstar.comm.job import DIRECTORY  # noqa: PLC0415  (imports torch)

        seen = Path.cwd(), Path(environment[DIRECTORY]) / "socket"  # which no other machine has by chance
        of = command, member, slot, environment
        return NodeProcess(self._ray, self._actors.remote(), of, seen=seen, torch_version=version("torch"))


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


def _resources(text: str) -> Mapping[str, float]:
    try:
        found = {name: float(need) for name, need in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        found = {}
    if not found or not all(0 < need < math.inf for need in found.values()):
        raise ConfigError(f"--resources {text}: what a rank takes of a node is expected, such as '{{\"rank\": 1}}'")
    return found


def _expect_listener(address: str) -> None:
    """Raises OSError where nobody listens at HOST:PORT: Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.rpartition("/")[2].strip("[]"), int(port)), timeout=_ANSWERS_S).close()
