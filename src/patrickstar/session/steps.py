"""The steps of an elastic session: between two of them ranks come and go, those left after a loss go on, and checkpoints are written."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from torch.distributed import DistNetworkError

from patrickstar.comm.job import AT_ONCE_S, Generation
from patrickstar.errors import RankLost
from patrickstar.session.resizing import Resized, Resizing, collect
from patrickstar.session.sample_order import Draw, Draws
from patrickstar.session.step_parts import StepParts

_log = logging.getLogger("patrickstar")
_KEPT: Final = 2
_TERMINATED: Final = 143


class StepsToDo:
    """An iterator over the steps of a session that are still to be done.

    Args:
        draws: what parts draw. load: makes batches of that. extra: what has a state that follows steps, by name.

    Attributes:
        step: the number of the next step, from 0 on.
    """

    def __init__(
        self,
        session: Any,
        draws: Draws,
        load: Callable[[Iterator[Draw]], Iterator[Any]],
        extra: Mapping[str, Any],
    ) -> None:
        self.step = 0
        self._session, self._draws, self._load_batches = session, draws, load
        self._extra = extra
        self._current: StepParts | None = None
        self._batches: Iterator[Any] | None = None
        self._saved = -1
        self._has_begun = False
        self._handled: Any = None
        self._parent = os.getppid()
        self._told_s = math.inf  # to stop, and when

    def __iter__(self) -> StepsToDo:
        return self

    def __next__(self) -> StepParts:
        resizing = self._session.resizing
        if resizing is None:
            self._end_step()
            return self._begin_step()
        lost = self._current.lost if self._current is not None else None
        while True:
            try:
                if lost is not None:
                    self._recover(resizing, lost)
                return self._next_step(resizing)
            except RankLost as error:  # noqa: PERF203  (once in a step)
                lost = error.with_traceback(None)

    def _next_step(self, resizing: Resizing) -> StepParts:
        if not self._has_begun:
            self._begin(resizing)
        if self._end_step():
            self._save(resizing)
            raise SystemExit(_TERMINATED)
        try:
            self._change(resizing)
        except DistNetworkError:  # the store is gone, with the supervisor
            self._stop()
        if self._is_due(resizing):
            self._save(resizing)
        return self._begin_step()

    def _end_step(self) -> bool:
        """Takes the end of the step before; gives whether some rank was told to stop in it."""
        current, self._current = self._current, None
        if current is None:
            return self._told_s < math.inf and self._session.world_size == 1
        stops = current.end(is_told=self._told_s < math.inf)
        self.step += 1
        return stops

    def _begin_step(self) -> StepParts:
        session = self._session
        if not session.is_member or self.step >= self._draws.total:
            self._end()
            raise StopIteration
        parts, rank, size = session._parts, session.rank, session.world_size
        is_first = self._batches is None
        if self._batches is None:
            self._batches = self._load_batches(self._draws.of_rank(self.step, rank, size))
        self._current = StepParts(
            self.step,
            self._draws,
            of=parts,
            rank=rank,
            size=size,
            batches=self._batches,
            is_told=lambda: self._told_s < math.inf,
            is_first=is_first,
        )
        parts.training.lr_factor = self._draws.lr_factor(self.step)
        return self._current

    # the job

    def _begin(self, resizing: Resizing) -> None:
        """Takes up the newest checkpoint of the job, if there is one; from now on SIGTERM ends a step, and not the process."""
        self._has_begun = True
        if resizing.job.directory is not None and self._session.is_member:
            resizing.job.begins(replace(resizing.job.now, batches=self._load(resizing)))
            self._draws = replace(self._draws, batches=(*self._draws.batches, *resizing.job.now.batches))
        if threading.current_thread() is threading.main_thread():
            self._handled = signal.signal(signal.SIGTERM, self._stop)

    def _end(self) -> None:
        if self._handled is not None:
            signal.signal(signal.SIGTERM, self._handled)
            self._handled = None
        if self._session.resizing is not None and self._session.rank == 0:
            self._session.resizing.job.over()

    def _stop(self, *signals: object) -> None:
        # One whose supervisor is gone has missed its store before, perhaps.
        if signals and time.monotonic() > self._told_s + AT_ONCE_S:
            sys.exit(_TERMINATED)
        self._told_s = min(self._told_s, time.monotonic())
        if os.getppid() != self._parent:  # nobody reads what is printed any more
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if not self._session.is_member:
            sys.exit(_TERMINATED)

    def _change(self, resizing: Resizing) -> None:
        """Has the ranks be those that are to do the next step, which this process waits for where it is none of them."""
        if self._session.is_member and self.step < self._draws.total:
            generation = resizing.job.next(self.step, self._draws.total)
            if generation is not None:
                self._resize(resizing, generation)
        while not self._session.is_member:
            generation = resizing.job.wait()
            if generation is None:
                return
            self._resize(resizing, generation)

    def _resize(self, resizing: Resizing, generation: Generation) -> None:
        session, before = self._session, resizing.job.now.size
        if generation.members == resizing.job.now.members:
            resizing.job.begins(generation)
            self._take_batches(resizing)
            return
        joins = not session.is_member
        if not joins:
            session._parts.begin_access()
            session._parts.end_step()
        began = time.monotonic()
        resized = resizing.change(generation, lambda: {**session.told(), "saved": self._saved, "extra": self._states()})
        collect()
        if resized is None:
            return
        self._batches, self.step = None, generation.step
        if session.is_member:
            session.take_told(resized.told, joins=joins)
            self._saved = resized.told["saved"]
            if joins:
                self._load_states(resized.told["extra"])
            seconds = time.monotonic() - began
            if (collectives := session._parts.collectives) is not None:
                seconds = max(collectives.agree(0.0 if joins else seconds, "seconds of a resize"))
            if session.rank == 0:
                _write_resize(resizing, generation, before, self.step, seconds=seconds, resized=resized)
            self._take_batches(resizing)

    def _take_batches(self, resizing: Resizing) -> None:
        """Has batches be those of the generation that is there, and says what has changed."""
        generation, draws, step = resizing.job.now, self._draws, self.step
        self._draws, self._batches = replace(draws, batches=(draws.batches[0], *generation.batches)), None
        before, after = (one.parts(step) * one.each for one in (draws, self._draws))
        if before == after or self._session.rank != 0:
            return
        factor = self._draws.lr_scaling(after / draws.batches[0][1])
        said = "batches of %d samples in place of %d from step %d on, learning rates times %.4g: %s"
        _log.warning(said, after, before, step, factor, generation.why)
        event = {"event": "batch", "step": step, "from": before, "to": after}
        _write(resizing, {**event, "lr_factor": factor, "why": generation.why})

    # losses

    def _recover(self, resizing: Resizing, lost: RankLost) -> None:
        """Goes on without a rank, from the newest checkpoint."""
        self._current = self._batches = None
        before, began = resizing.job.now.size, time.monotonic()
        generation = resizing.job.survived(lost.reason)
        resizing.recover(generation)
        collect()
        self._load(resizing)
        if self._session.rank == 0:
            seconds = time.monotonic() - began
            _write_resize(resizing, generation, before, self.step, seconds=seconds, resized=Resized(0, 0, None))
        self._take_batches(resizing)

    # checkpoints

    def _is_due(self, resizing: Resizing) -> bool:
        every, is_new = resizing.job.save_every, self._saved < self.step < self._draws.total
        return is_new and self._session.is_member and every > 0 and self.step % every == 0

    def _save(self, resizing: Resizing) -> None:
        if resizing.job.directory is not None and self._saved != self.step:
            batches = [list(batch) for batch in resizing.job.now.batches]
            extra = {"step": self.step, "batches": batches, "states": self._states()}
            self._session.save_checkpoint(resizing.job.directory / "checkpoints", extra=extra, keep=_KEPT)
            self._saved = self.step

    def _load(self, resizing: Resizing) -> Any:
        """Takes the newest checkpoint up, if there is one; gives the batches that it knows of."""
        assert resizing.job.directory is not None
        directory = resizing.job.directory / "checkpoints"
        if not (directory / "latest").exists():
            return ()
        extra = self._session.load_checkpoint(directory)
        self.step = self._saved = extra["step"]
        self._load_states(extra["states"])
        return extra["batches"]

    def _states(self) -> dict[str, Any]:
        return {name: value.state_dict() for name, value in self._extra.items()}

    def _load_states(self, states: Mapping[str, Any]) -> None:
        for name, value in self._extra.items():
            value.load_state_dict(states[name])


def _write_resize(
    resizing: Resizing, generation: Generation, before: int, step: int, *, seconds: float, resized: Resized
) -> None:
    """Adds a line about a resize to the log of the job, and to that of the program."""
    event = {"event": "resize", "step": step, "from": before, "to": generation.size, "seconds": round(seconds, 4)}
    moved = {"moved_bytes": resized.moved_bytes, "least_bytes": resized.least_bytes}
    _log.info("%d ranks in place of %d from step %d on: %s", generation.size, before, step, generation.why)
    _write(resizing, {**event, **moved, "why": generation.why})


def _write(resizing: Resizing, event: Mapping[str, Any]) -> None:
    if resizing.job.directory is not None:
        with (resizing.job.directory / "log.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")
