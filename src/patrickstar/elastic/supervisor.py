"""The supervisor of a job: holds its store, starts its processes, takes orders, decides what becomes of the job when ranks are lost.

Processes beside the ranks, which are *warm*, have run the program up to its first step and wait there without states. What ranks do at the boundary
of a step they agree on by themselves (`comm/job.py`); here it is only seen to that there are as many processes as are asked for.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch.distributed as dist

from patrickstar.comm.job import (
    AT_ONCE_S,
    DIRECTORY,
    NOW,
    PLANNED,
    PRESENT,
    SAVE_EVERY,
    SIZES,
    Generation,
    ask,
    read_generation,
    waiting,
    write_generation,
)
from patrickstar.elastic.job_directory import JobDirectory
from patrickstar.elastic.rank_process import RankProcess
from patrickstar.elastic.ray_cluster import NodeProcess, RayCluster
from patrickstar.errors import ConfigError

_POLL_S: Final = 0.05
# After that a process that is stopped, or does not answer where others were lost, counts as lost; on nodes ranks find out by hearts (`comm/watch.py`)
_LOST_S: Final = 10.0
_ELSEWHERE_KNOWS_S: Final = 40.0
_ENDS_S: Final = 30.0
_RESTARTS: Final = 3  # without a step further than ever before


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A request for a job.

    Attributes:
        warm: processes beside the ranks, at most. planned: sizes by step, as `100:2,200:4`. replaces: whether what is lost is replaced.
    """

    command: Sequence[str]
    least: int
    most: int
    size: int
    warm: int
    threads: int
    save_every: int
    replaces: bool = False
    planned: str = ""


class Supervisor:
    """Runs a job to its end, on this machine, or on nodes. There, exit status 75 says that too few ranks are left, and may be more later."""

    def __init__(self, request: JobRequest, directory: JobDirectory, nodes: RayCluster | None = None) -> None:
        self._request, self._directory = request, directory
        self._host, self._lost_status = (nodes.host, os.EX_TEMPFAIL) if nodes else ("127.0.0.1", 1)
        self._knows_s = _ELSEWHERE_KNOWS_S if nodes else _LOST_S
        self._start_process: Callable[..., RankProcess | NodeProcess] = nodes.start if nodes else RankProcess
        self._processes: dict[int, RankProcess | NodeProcess] = {}
        self._lost: dict[int, str] = {}
        self._next_member = 0
        self._want = request.size
        self._statuses: dict[int, int] = {}
        self._ends_with: int | None = None
        self._ends_at = math.inf
        self._restarts, self._furthest = 0, -1
        self._unanswered_at: float | None = None
        self._store: dist.Store | None = None
        self._devices: Mapping[str, str] = {}  # that a process is shown, where it has been said

    def run(self) -> int:
        """The exit status of the job, when all of its processes have ended."""
        self._directory.make()
        with ExitStack() as end:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
                end.callback(signal.signal, number, signal.signal(number, self._on_signal))
            end.callback(self._signal_all, signal.SIGKILL)
            serve = end.enter_context(self._directory.taking_orders(self._carry_out))
            self._start(self._request.size)
            while (status := self._looked()) is None:
                serve(_POLL_S)
            return status

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            process.signal(number)

    # orders

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._ask(self._request.least, "signal")
        elif number == signal.SIGUSR2:
            self._ask(self._request.most, "signal")
        else:
            again, self._ends_with = time.monotonic() > self._ends_at - _ENDS_S + AT_ONCE_S, 128 + number
            self._ends_at = min(self._ends_at, time.monotonic() + _ENDS_S)
            if again or self._read("over") is None:  # after its last step it has no more than its end to come to
                self._signal_all(signal.SIGKILL if again else signal.SIGTERM)

    def _carry_out(self, order: Any) -> Mapping[str, Any]:
        if order["do"] == "resize":
            self._devices = order.get("devices", self._devices)
            size = int(order["size"])
            if not self._request.least <= size <= self._request.most:
                return {"error": f"{size} ranks: this job has {self._request.least} to {self._request.most}"}
            self._ask(size, order.get("why", "asked"), order.get("batch"))
        generation, progress = self._generation(), self._read("progress")
        members = () if generation is None else generation.members
        pids = {member: process.pid for member, process in self._processes.items()}
        known: dict[str, Any] = {"step": int(progress or 0), "has_begun": progress is not None}
        known |= {"size": len(members), "want": self._want, "min": self._request.least, "max": self._request.most}
        return known | {
            "slots": [process.slot for process in self._processes.values()],
            "ranks": [{"rank": rank, "pid": pids[one]} for rank, one in enumerate(members) if one in pids],
            "waiting": [pid for member, pid in pids.items() if member not in members],
            "checkpoint": str(self._directory.newest_checkpoint or ""),
        }

    def _ask(self, size: int, why: str, batch: int | None = None) -> None:
        if (store := self._job()) is not None:
            ask(store, size, why, batch)
        elif batch is not None:
            raise ConfigError(f"a batch of {batch} samples: the job has not come to its first step")
        self._want = size
        self._fill(size)

    # processes

    def _start(self, size: int) -> None:
        """Starts the program anew with so many ranks, and those that wait; it begins with the newest checkpoint, if there is one."""
        listening = socket.create_server((self._host, 0))
        port = listening.getsockname()[1]
        self._store = dist.TCPStore(
            self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self._next_member, self._want = 0, size
        self._environment = {
            SIZES: f"{self._request.least}:{self._request.most}",
            PRESENT: str(size),
            DIRECTORY: str(self._directory.path.absolute()),
            SAVE_EVERY: str(self._request.save_every),
            PLANNED: self._request.planned,
            "MASTER_ADDR": self._host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # it is here
            "LOCAL_WORLD_SIZE": str(self._request.most),
            "OMP_NUM_THREADS": str(self._request.threads),
            "PYTHONUNBUFFERED": "1",
        }
        self._fill(size)

    def _fill(self, size: int) -> None:
        """Starts processes until there are as many as ranks and warm ones together."""
        wanted = min(self._request.most, size + self._request.warm)
        while len(self._processes) < wanted and self._ends_with is None and self._read("over") is None:
            slot = min({*range(len(self._processes) + 1)} - {one.slot for one in self._processes.values()})
            self._processes[self._next_member] = self._start_process(
                self._request.command, self._next_member, slot, {**self._environment, **self._devices}
            )
            self._next_member += 1

    def _looked(self) -> int | None:
        """Looks at all processes, and does what has to be done; the exit status once the job is over."""
        for member, process in list(self._processes.items()):
            if process.stopped_s() > _LOST_S:
                process.signal(signal.SIGKILL)
            if (status := process.status) is not None:
                del self._processes[member]
                self._ended(member, status)
        over = self._read("over") is not None
        if self._ends_with is None and not over and (self._lost or self._are_at_a_loss()):
            return self._recover()
        if not self._processes:
            counted = self._members() if self._ends_with else self._statuses  # ranks may have come to their end
            failed = next((status for member in counted if (status := self._statuses.get(member, self._ends_with))), 0)
            return failed and (self._ends_with or (128 - failed if failed < 0 else failed))
        if time.monotonic() > self._ends_at:
            self._signal_all(signal.SIGKILL)
        self._follow_program()
        self._dismiss()
        return None

    def _ended(self, member: int, status: int) -> None:
        how, members = signal.Signals(-status).name if status < 0 else f"exit status {status}", self._members()
        if (store := self._job()) is not None:
            store.set(f"gone/{member}", "1")
        if member in members or self._ends_with is not None or self._read("over") is not None:
            self._statuses[member] = status
            if status and member in members:
                self._lost[member] = how
            return
        stays = "; ranks stay as they are" if len(self._processes) < self._want else ""
        if status:
            _say(f"a process that waited has ended ({how}){stays}")
        if stays and store is not None:
            ask(store, len(members), "a process that was to join has ended")

    def _follow_program(self) -> None:
        """Has as many processes as the program itself has asked for, or somebody before it could be told."""
        want, store = self._read("want"), self._job()
        if want is not None and (size := json.loads(want)["size"]) != self._want:
            self._want = size
            self._fill(size)
        elif want is None and store is not None and str(self._want) != self._environment[PRESENT]:
            self._ask(self._want, "asked")

    def _dismiss(self) -> None:
        """Ends processes that wait, where there are more than are to: what they hold is for others."""
        store, generation = self._job(), self._generation()
        if store is None or generation is None or generation.size != self._want:
            return
        if len(self._processes) <= self._want + self._request.warm:
            return
        for member in [*waiting(store)][self._request.warm :]:
            if member in self._processes:
                store.set(f"gone/{member}", "1")
                self._processes.pop(member).signal(signal.SIGKILL)

    # losses

    def _are_at_a_loss(self) -> bool:
        """Tells whether ranks have lost others, whether or not a process has ended."""
        if (store := self._job()) is None or not store.check([f"survivors/{(loss := store.add('losses', 0) + 1)}"]):
            return False
        # Not whoever was given up and has only been out of reach.
        return any(store.check([f"survivor/{loss}/{member}"]) for member in self._processes)

    def _recover(self) -> int | None:
        """Has the job go on without the ranks that are lost, once those that are left have said that they know of it."""
        store, generation, members = self._job(), self._generation(), self._members()
        left = [member for member in members if member in self._processes]
        loss = 0 if store is None else store.add("losses", 0) + 1
        said = {
            member: json.loads(text) for member in left if (text := self._read(f"survivor/{loss}/{member}")) is not None
        }
        self._unanswered_at = self._unanswered_at or time.monotonic()
        if len(said) < len(left):
            if time.monotonic() - self._unanswered_at > self._knows_s:
                for member in set(left) - said.keys():
                    self._processes[member].signal(signal.SIGKILL)
            return None
        self._unanswered_at = None
        lost, self._lost = self._lost, {}
        ranks = [f"lost rank {members.index(member)} ({how})" for member, how in lost.items() if member in members]
        reached = int(self._read("progress") or 0)
        self._restarts = 1 if reached > self._furthest else self._restarts + 1
        self._furthest = max(self._furthest, reached)
        reason = next((known["reason"] for known in said.values()), "")
        why = ", ".join(ranks) or f"ranks have lost each other: {reason}"
        newest = self._directory.newest_checkpoint
        if store is None or len(left) < self._request.least or newest is None or self._restarts > _RESTARTS:
            return self._begin_again(why, lost, left)
        assert generation is not None
        number = max(known["number"] for known in said.values()) + 2
        batches = read_generation(store.get(f"generation/{number - 2}")).batches
        write_generation(store, Generation(number, tuple(left), -1, why, batches))
        store.set(f"recovery/{loss}", str(number))
        store.add("losses", 1)
        for member in lost:
            del self._statuses[member]  # the job has survived it
        self._want = len(left)
        ask(store, self._request.size if self._request.replaces else len(left), "replaces a lost rank")
        self._fill(self._request.size if self._request.replaces else len(left))
        return None

    def _begin_again(self, why: str, lost: Mapping[int, str], left: Sequence[int]) -> int | None:
        """Starts the program anew, from the newest checkpoint or from the beginning; the exit status where it does not go on."""
        newest = self._directory.newest_checkpoint
        failed = [status for member, status in self._statuses.items() if member in lost and status > 0]
        size = self._request.size if self._request.replaces else len(left)
        self._signal_all(signal.SIGKILL)
        if size < self._request.least or self._restarts > _RESTARTS or failed:
            where = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint"
            _say(f"{why}; {len(left)} of at least {self._request.least} ranks are left; {where}")
            return (failed[0] if not left else 1) if failed else self._lost_status
        _say(
            f"{why}; training begins again, {'from the newest checkpoint' if newest else 'as there is no checkpoint yet'}"
        )
        while any(process.status is None for process in self._processes.values()):
            time.sleep(_POLL_S)
        self._processes.clear()
        self._statuses.clear()
        self._start(size)
        return None

    # the store

    def _job(self) -> dist.Store | None:
        """The store as the job that is there now has it, once there is one."""
        store = self._store
        return dist.PrefixStore(store.get(NOW).decode(), store) if store is not None and store.check([NOW]) else None

    def _read(self, key: str) -> bytes | None:
        store = self._job()
        return store.get(key) if store is not None and store.check([key]) else None

    def _generation(self) -> Generation | None:
        """The generation that is there now."""
        number = self._read("present")
        return None if number is None else read_generation(self._read(f"generation/{number.decode()}") or b"")

    def _members(self) -> Sequence[int]:
        """The ranks that are there now, or will be the first."""
        generation = self._generation()
        return range(int(self._environment[PRESENT])) if generation is None else generation.members


def _say(text: str) -> None:
    sys.stderr.write(f"patrickstar: {text}\n")
    sys.stderr.flush()
