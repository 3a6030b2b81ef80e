"""Kills at any moment of training and saving, of one rank or of all: `python -m tests.session.kills SEED COUNT`.

A moment is an event on one rank: a collective that it issues, or an operation on files of a checkpoint. Whatever is killed there, the newest
checkpoint that was complete loads, with the bits that training had then.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from patrickstar.comm.collectives import Collectives
from patrickstar.errors import CheckpointError, RankError
from patrickstar.memory.fileio import FileIO
from tests.ranks import Ended, all_well, team
from tests.session.rank_programs import Bits, bits_of, expect_same, managed, train

RANKS, STEPS = 2, 3
_OPERATIONS = ("open", "pwritev", "truncate", "fsync", "close", "rename", "unlink", "make_directory", "sync_directory")


@dataclass
class Moments:
    """The events of this rank so far; at number `at`, processes are killed."""

    at: int = -1
    pids: Sequence[int] = ()
    counts: bool = True
    seen: list[str] = field(default_factory=list)

    def watched(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        """The same, as an event."""

        def event(*arguments: Any, **keywords: Any) -> Any:
            if len(self.seen) == self.at:
                for pid in self.pids:
                    os.kill(pid, signal.SIGKILL)
            if self.counts:
                self.seen.append(name)
            return act(*arguments, **keywords)

        return event


def program(rank: int, path: Path, victim: int, at: int, pids: Sequence[int]) -> tuple[list[Bits], list[str]]:
    """Trains, and saves after each step; notes which steps have been saved. `pids`: what `victim` kills at its event `at`."""
    moments, found = Moments(at if rank == victim else -1, pids), list[Bits]()

    class WatchedFiles(FileIO):
        def __init__(self) -> None:
            for name in _OPERATIONS:
                setattr(self, name, moments.watched(name, getattr(super(), name)))

    issue = moments.watched("collective", Collectives._issue)
    with (
        mock.patch("patrickstar.checkpoint.storage.FileIO", WatchedFiles),
        mock.patch.object(Collectives, "_issue", issue),
    ):
        with managed() as (model, session):
            torch.manual_seed(rank)
            for step in range(STEPS):
                train(model, session, 1)
                session.save_checkpoint(path, keep=2)
                (path.parent / f"saved {step + 1} {rank}").touch()
                if at < 0:
                    moments.counts = False
                    found.append(bits_of(model, session))
                    moments.counts = True
    return found, moments.seen


def undisturbed() -> tuple[list[Bits], list[list[str]]]:
    """The bits after each step, and the events of each rank, where nobody is killed."""
    with team(RANKS) as ranks, tempfile.TemporaryDirectory() as folder:
        of_all = all_well(ranks.run(program, Path(folder) / "run", 0, -1, ()))
    return of_all[0][0], [events for _, events in of_all]


def draw(seed: int, count: int, events: Sequence[Sequence[str]]) -> list[tuple[int, int, bool]]:
    """Moments to kill at: (rank, number of its event, whether all ranks are killed there). Half of them are operations on files."""
    drawn, found = random.Random(seed), []
    for _ in range(count):
        victim, is_of_files, kills_all = drawn.randrange(RANKS), drawn.random() < 0.5, drawn.random() < 0.4
        numbers = [at for at, name in enumerate(events[victim]) if not is_of_files or name != "collective"]
        found.append((victim, drawn.choice(numbers), kills_all))
    return found


def kill_and_load(want: Sequence[Bits], victim: int, at: int, kills_all: bool) -> int:
    """The step of the checkpoint that loads after such a kill, 0 where none was complete; AssertionError where something is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        with team(RANKS) as ranks:
            pids = [pid for rank, pid in enumerate(ranks.pids) if kills_all or rank == victim]
            answers = ranks.run(program, path, victim, at, sorted(pids, key=lambda pid: pid == ranks.pids[victim]))
        for rank, answer in enumerate(answers):
            is_killed = kills_all or rank == victim
            # The last that a rank does, others may not need.
            assert isinstance(answer, Ended if is_killed else RankError | tuple), answer
        saved = max((int(file.name.split()[1]) for file in path.parent.glob("saved *")), default=0)
        with managed(5) as (model, session):
            try:
                session.load_checkpoint(path)
            except CheckpointError:
                assert saved == 0
                return 0
            bits = bits_of(model, session)
            step = int(session.save_checkpoint(path).name.removeprefix("step-"))
        assert step >= saved
        expect_same(want[step - 1], bits, but="running")
        assert not [file for file in path.iterdir() if file.name.startswith(".")], "the next writer cleans up"
        return step


def main(seed: int, count: int) -> None:
    """Kills so often, and says where."""
    want, events = undisturbed()
    for number, (victim, at, kills_all) in enumerate(draw(seed, count, events), 1):
        whom = "all ranks" if kills_all else f"rank {victim}"
        where = f"event {at} of {len(events[victim])} of rank {victim}, {events[victim][at]}"
        print(f"{number}/{count}: {whom} killed at {where}", end="", flush=True)
        print(f": step {kill_and_load(want, victim, at, kills_all)} loads", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
