"""Ranks for tests: processes with a process group of gloo, which do what they are told and say what came of it.

They are forked from a process that has imported torch (`tests/forked.py`). Their store is a file, or is held by rank 0, as in a program:
connections to that take seconds each where no server of names answers.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.forked import forkserver


@dataclass(frozen=True)
class Ended:
    """A rank that ended without an answer: its exit status, as `multiprocessing` has it, or None where it had to be killed."""

    status: int | None


class Team:
    """Processes that are the ranks of one process group. `over_tcp`: whether rank 0 holds their store."""

    def __init__(self, size: int, *, over_tcp: bool = False) -> None:
        self.size = size
        self.has_all = True
        self._pipes: list[Connection] = []
        self._processes = []
        self._folder = tempfile.TemporaryDirectory()
        where = "" if over_tcp else f"{self._folder.name}/store"
        for rank in range(size):
            ours, theirs = forkserver().Pipe()
            process = forkserver().Process(target=_serve, args=(theirs, rank, size, where), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
            if not where:
                where = str(ours.recv())

    @property
    def pids(self) -> list[int]:
        """Their numbers as processes, in order."""
        return [process.pid or 0 for process in self._processes]

    def run(
        self, act: Callable[..., Any], *arguments: Any, without: Sequence[int] = (), within_s: float = 60.0
    ) -> list[Any]:
        """What `act(rank, *arguments)` gives on each rank, or what it raises; `Ended` where a rank ended.

        Those that have not answered by then are killed, and those that it can do `without` once all others have.
        """
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            with suppress(OSError):  # it has ended
                pipe.send((act, arguments))
        until = time.monotonic() + within_s
        answers: dict[int, Any] = {}
        while left := [rank for rank in range(self.size) if rank not in answers]:
            pipes = [self._pipes[rank] for rank in left]
            if set(left) <= set(without) or not wait(pipes, max(0, until - time.monotonic())):
                for rank in left:
                    self._processes[rank].kill()
                    answers[rank] = Ended(None)
            for rank in left:
                if rank not in answers and self._pipes[rank].poll():
                    answers[rank] = self._answer(rank)
        self.has_all = not any(isinstance(answer, Ended) for answer in answers.values())
        self._signal(
            signal.SIGSTOP
        )  # gloo's threads wake up a hundred times a second, one for each group that there has been
        return [answers[rank] for rank in range(self.size)]

    def _signal(self, which: signal.Signals) -> None:
        for process in self._processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, which)

    def _answer(self, rank: int) -> Any:
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join()
            return Ended(self._processes[rank].exitcode)

    def end(self) -> None:
        """Ends them, whatever they do."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


@contextmanager
def team(size: int, *, over_tcp: bool = False) -> Iterator[Team]:
    """A team until the end of the block."""
    made = Team(size, over_tcp=over_tcp)
    try:
        yield made
    finally:
        made.end()


class Teams:
    """Teams by size, started when they are asked for and kept; one that has lost a rank is followed by another."""

    def __init__(self) -> None:
        self._teams: dict[int, Team] = {}

    def __call__(self, size: int) -> Team:
        if size in self._teams and not self._teams[size].has_all:
            self._teams.pop(size).end()
        return self._teams[size] if size in self._teams else self._teams.setdefault(size, Team(size))

    def end(self) -> None:
        """Ends them all."""
        for made in self._teams.values():
            made.end()


def all_well(answers: Sequence[Any]) -> list[Any]:
    """The answers, of which none is an error."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        assert not isinstance(answer, Ended), answer
    return list(answers)


def kill_me() -> None:
    """Ends this process as the kernel does where memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_me() -> None:
    """Stops this process, until somebody has it go on."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1)  # the signal may be another thread's to take, and this one would go on until then


def _serve(pipe: Connection, rank: int, size: int, where: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # what was imported before the fork stays where it is, in memory that is shared with that process
    if where and not where.isdigit():
        store: dist.Store = dist.FileStore(where, size)
    else:
        store = dist.TCPStore("127.0.0.1", int(where or 0), size, is_master=not where, wait_for_workers=False)
        if not where:
            pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    with suppress(EOFError):  # the test has ended
        while True:
            act, arguments = pipe.recv()
            try:
                answer = act(rank, *arguments)
            except SystemExit:  # children of multiprocessing leave that out
                atexit._run_exitfuncs()
                os._exit(0)
            except BaseException as error:
                error.add_note(traceback.format_exc())  # which pickle leaves out
                answer = error
            pipe.send(answer)
