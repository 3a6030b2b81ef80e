"""A Ray cluster, whose nodes have places for ranks. Ray is an extra, imported where somebody asks for a cluster."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from patrickstar.elastic.node_process import NodeActor, NodeProcess
from patrickstar.errors import ConfigError

_OPTIONS: Final = MappingProxyType({"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"})
_ANSWERS_S: Final = 5.0


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
