"""Sessions whose steps are in numbered parts, on as many ranks as there are at each of them."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from patrickstar.config.kinds import refuse
from patrickstar.errors import StateError
from patrickstar.optim.user_optimizer import restore_groups
from patrickstar.session.close import Closing
from patrickstar.session.parts import Parts, PresentParts
from patrickstar.session.resizing import Resizing
from patrickstar.session.sample_order import Draw, DrawnSamples, SampleOrder, keyed_seed
from patrickstar.session.step_parts import StepParts

_log = logging.getLogger("patrickstar")
_UNCLOSED = (
    "%s was never closed: its states are gone. Use `with patrickstar.manage(...) as session:`, or call session.close()"
)


class Elastic:
    """What a session is in an elastic job: which of its ranks, in which step. One process by itself is rank 0 of 1."""

    optimizer: Any
    scaler: torch.amp.GradScaler
    resizing: Resizing | None = None
    """Of an elastic job; `manage` sets it."""

    unclosed: weakref.finalize[Any, Any] | None = None
    """Warns of a session that nobody closes."""

    _steps_before = 0

    def __init__(self, parts: Parts | None, closing: Callable[..., Closing] | None) -> None:
        self.present = PresentParts(parts)
        self._make_closing = closing

    @property
    def _parts(self) -> Parts:
        return self.present.expect()

    @property
    def steps_done(self) -> int:
        """Number of steps of training so far, those of checkpoints that were loaded included."""
        return self._steps_before + self._parts.stretches.counts.steps

    def installed(self, parts: Parts | None, closing: Callable[..., Closing] | None) -> None:
        """Takes parts in the place of those that there were."""
        self.present.parts, self._make_closing = parts, closing
        self.expect_close()

    def expect_close(self) -> None:
        """Has a session that nobody closes be told of. Its store lives as long as anything can use it: the model, the optimizer, or the session."""
        if self.unclosed is not None:
            self.unclosed.detach()
        if self.is_member:
            self.unclosed = weakref.finalize(self._parts.executor.store, _log.warning, _UNCLOSED, repr(self))

    def take_told(self, told: Mapping[str, Any], *, joins: bool) -> None:
        """Takes what the first rank has told of a job. `joins`: whether this process has not been there before."""
        self._steps_before = told["steps"]
        if joins:
            restore_groups(self.optimizer.param_groups, {"param_groups": told["groups"]})
            if told["scaler"]:
                self.scaler.load_state_dict(told["scaler"])

    def told(self) -> dict[str, Any]:
        """What those that join have to know beside what is in chunks."""
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        return {"groups": groups, "scaler": self.scaler.state_dict(), "steps": self.steps_done}

    @property
    def rank(self) -> int:
        """The place of this process among the ranks that share the model; -1 where it is none of them now."""
        if (parts := self.present.parts) is None:
            return -1
        return 0 if parts.collectives is None else parts.collectives.ranks.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that share the model."""
        if (parts := self.present.parts) is None:
            return 0 if self.resizing is None else self.resizing.job.now.size
        return 1 if parts.collectives is None else parts.collectives.ranks.size

    @property
    def is_member(self) -> bool:
        """Whether this process is one of the ranks now."""
        return self.present.parts is not None

    def resize(self, n: int) -> None:
        """Asks for `n` ranks from the next boundary between steps on that all agree on. Returns at once; on one rank, or on all alike.

        Raises:
            ConfigError: the job has never so many. StateError: this is no elastic job.
        """
        if self.resizing is None:
            raise StateError(
                "resize() outside of an elastic job: start the program by `patrickstar elastic run --min 1 --max 4 -- python ...`"
            )
        self.resizing.job.ask(n, "asked")

    def steps(
        self,
        dataset: Any,
        batch_size: int,
        parts: int,
        total: int | None = None,
        seed: int = 0,
        epochs: float | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> Iterator[StepParts]:
        """Gives the steps that are still to be done, each a `with` block and an iterator over this rank's parts of it.

        Rank r of W computes parts r, r + W, ...; the bits of the run depend on batch size, parts and seed, and not on the number of ranks.

        Args:
            dataset: a map-style dataset. batch_size: samples of a step. parts: of a step, each of as many samples.
            total: number of steps; or epochs: how often each sample is seen. seed: of the order of samples, and of what torch draws in a part.
            collate_fn: makes a batch of the samples of a part; torch's by default. num_workers: processes that fetch samples.
        Raises:
            ConfigError: before the first step. StateError: no optimizer is managed, or ranks were not started as an elastic job.
        """
        _check(self, dataset, batch_size, parts, total, epochs)
        count = total if total is not None else math.ceil(float(epochs or 0) * len(dataset) / batch_size)
        if self.resizing is None and parts > 1:  # what is added to is not rounded first
            self._parts.events.late_planes.widen_gradients()
        draws = _Draws(SampleOrder(len(dataset), seed), batch_size, parts, count, seed)
        load = _Loading(DrawnSamples(dataset), collate_fn, num_workers)
        return _Steps(self, draws, load)


@dataclass(frozen=True, slots=True)
class _Draws:
    order: SampleOrder
    batch_size: int
    parts: int
    total: int
    seed: int

    def seed_of(self, step: int, part: int) -> int:
        return keyed_seed(self.seed, step, part)

    def of_rank(self, step: int, rank: int, size: int) -> Iterator[Draw]:
        """The draws of one of so many ranks, from a step on."""
        each = self.batch_size // self.parts
        for at in range(step, self.total):
            for part in range(rank, self.parts, size):
                yield Draw(self.seed_of(at, part), self.order.indices(at * self.batch_size + part * each, each))


@dataclass(frozen=True, slots=True)
class _Loading:
    samples: DrawnSamples
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int

    def batches(self, draws: Iterator[Draw]) -> Iterator[Any]:
        """The batches of these draws. Numbers that torch's loader draws for itself are not the program's."""
        loader: DataLoader[Any] = DataLoader(
            self.samples,  # type: ignore[arg-type]  # asked for many at once alone
            batch_sampler=draws,  # type: ignore[arg-type]  # of draws
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            generator=torch.Generator(),
        )
        return iter(loader)


@dataclass(eq=False)
class _Steps:
    """The steps of a session from the first that is still to be done."""

    session: Elastic
    draws: _Draws
    loading: _Loading
    step: int = 0
    _current: StepParts | None = None
    _batches: Iterator[Any] | None = None

    def __iter__(self) -> _Steps:
        return self

    def __next__(self) -> StepParts:
        session, resizing = self.session, self.session.resizing
        if self._current is not None:
            self._current.expect_completed()
            self._current = None
            self.step += 1
        if resizing is not None:
            self._change(resizing)
        if not session.is_member or self.step >= self.draws.total:
            if resizing is not None and session.rank == 0:
                resizing.job.over()
            raise StopIteration
        parts, rank, size = session._parts, session.rank, session.world_size
        if self._batches is None:
            self._batches = self.loading.batches(self.draws.of_rank(self.step, rank, size))
        self._current = StepParts(
            self.step,
            self.draws.parts,
            of=parts,
            rank=rank,
            size=size,
            seed_of=self.draws.seed_of,
            batches=self._batches,
        )
        parts.training.completing = self._current.complete
        return self._current

    def _change(self, resizing: Resizing) -> None:
        """Has the ranks be those that are to do the next step, which this process waits for where it is none of them."""
        if self.session.is_member and self.step < self.draws.total:
            generation = resizing.job.next(self.step)
            if generation is not None:
                self._resize(resizing, generation)
        while not self.session.is_member:
            generation = resizing.job.wait()
            if generation is None:
                return
            self._resize(resizing, generation)

    def _resize(self, resizing: Resizing, generation: Any) -> None:
        session, joins = self.session, not self.session.is_member
        resized = resizing.change(generation, session.told)
        if resized is not None:
            self._batches, self.step = None, generation.step
            if session.is_member:
                session.take_told(resized.told, joins=joins)


def _check(
    session: Elastic, dataset: Any, batch_size: int, parts: int, total: int | None, epochs: float | None
) -> None:
    problems = []
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        problems.append(
            f"dataset={type(dataset).__name__}: a map-style dataset is expected, with a length and samples by number"
        )
    elif not len(dataset):
        problems.append("dataset: it has no samples")
    if parts < 1 or batch_size < 1 or batch_size % max(parts, 1):
        problems.append(f"batch_size={batch_size}: a multiple of parts={parts} is expected")
    if (total is None) == (epochs is None):
        problems.append(f"total={total}, epochs={epochs}: one of them is expected")
    if session.resizing is not None and parts < session.resizing.job.most:
        problems.append(f"parts={parts}: as many as the job may have ranks are expected, {session.resizing.job.most}")
    if session.is_member and session.present.expect().training.in_backward:
        problems.append(
            'step="in_backward": gradients of a step in parts are kept until all have come; leave step= out'
        )
    refuse(problems, of="steps")
    if session.optimizer is None:
        raise StateError("steps(): this session manages weights only: pass an optimizer to manage()")
    if session.resizing is None and session.world_size > 1:
        raise StateError(
            "steps() over ranks that average their gradients: start them by `patrickstar elastic run`, or set PATRICKSTAR_ELASTIC=4:4 "
            "for torchrun's processes"
        )
