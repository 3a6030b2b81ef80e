"""Sessions whose steps are in numbered parts, on as many ranks as there are at each of them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from patrickstar.config.kinds import refuse
from patrickstar.errors import StateError
from patrickstar.optim.user_optimizer import restore_groups
from patrickstar.session.close import Closing
from patrickstar.session.optimizer_target import OptimizerTarget
from patrickstar.session.parts import Parts
from patrickstar.session.resizing import Resizing
from patrickstar.session.sample_order import LR_SCALING, Draws, SampleOrder, load_batches
from patrickstar.session.scaler import LossScaler
from patrickstar.session.steps import StepsToDo

_log = logging.getLogger("patrickstar")
_UNCLOSED = (
    "%s was never closed: its states are gone. Use `with patrickstar.manage(...) as session:`, or call session.close()"
)


class ElasticSession:
    """A session as part of an elastic job, of which it is one rank, or none for now. One process by itself is rank 0 of 1."""

    optimizer: Any
    scaler: torch.amp.GradScaler
    resizing: Resizing | None = None
    """Of an elastic job; `manage` sets it."""

    unclosed: weakref.finalize[Any, Any] | None = None
    """Warns of a session that nobody closes."""

    _steps_before = 0

    def __init__(self, parts: Parts | None, closing: Callable[..., Closing] | None) -> None:
        self._make_closing = closing
        self.present = parts
        """The parts that the session has; None while its process is none of the ranks."""

    @property
    def _parts(self) -> Parts:
        if self.present is None:
            raise StateError(
                "this process is no rank of its job now, and has no states: it waits for its turn in session.steps(), or the job is over"
            )
        return self.present

    @property
    def steps_done(self) -> int:
        """Number of steps of training so far, those of checkpoints that were loaded included."""
        return self._steps_before + self._parts.stretches.counts.steps

    def installed(self, parts: Parts | None, closing: Callable[..., Closing] | None) -> None:
        """Takes parts in the place of those that there were."""
        self.present, self._make_closing = parts, closing
        if parts is None:
            self.optimizer.target = None
        else:
            self.optimizer.target = OptimizerTarget(parts, self.optimizer.original)
            if isinstance(self.scaler, LossScaler):
                self.scaler.training = parts.training
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
        """Facts that those that join have to know beside what is in chunks."""
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        return {"groups": groups, "scaler": self.scaler.state_dict(), "steps": self.steps_done}

    @property
    def rank(self) -> int:
        """The place of this process among the ranks that share the model; -1 where it is none of them now."""
        if (parts := self.present) is None:
            return -1
        return 0 if parts.collectives is None else parts.collectives.ranks.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that share the model."""
        if (parts := self.present) is None:
            return 0 if self.resizing is None else self.resizing.job.now.size
        return 1 if parts.collectives is None else parts.collectives.ranks.size

    @property
    def is_member(self) -> bool:
        """True where this process is one of the ranks now."""
        return self.present is not None

    def resize(self, n: int, batch: int | None = None) -> None:
        """Asks for `n` ranks from the next boundary between steps on that all agree on. Returns at once; on one rank, or on all alike.

        Args:
            batch: samples of a step from there on, of a job whose batches grow.
        Raises:
            ConfigError: the job has never so many. StateError: this is no elastic job.
        """
        if self.resizing is None:
            raise StateError(
                "resize() outside of an elastic job: start the program by `patrickstar elastic run --min 1 --max 4 -- python ...`"
            )
        self.resizing.job.ask(n, "asked", batch)

    def steps(  # noqa: PLR0917  (as users type it)
        self,
        dataset: Any,
        batch_size: int,
        parts: int,
        total: int | None = None,
        seed: int = 0,
        epochs: float | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        batch: str = "fixed",
        max_batch: int | None = None,
        lr_scaling: str | Callable[[float], float] = "sqrt",
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> StepsToDo:
        """Gives the steps that are still to be done, each a `with` block and an iterator over this rank's parts of it.

        Rank r of W computes parts r, r + W, ...; the bits of the run depend on batch size, parts and seed, and not on the number of ranks.

        Args:
            dataset: a map-style dataset. batch_size: samples of a step. parts: of a step, each of as many samples.
            total: number of steps; or epochs: how often each sample is seen. seed: of the order of samples, and of what torch draws in a part.
            collate_fn: makes a batch of the samples of a part; torch's by default. num_workers: processes that fetch samples.
            batch: "grow": whoever resizes the job may have steps of more samples, up to max_batch, in whole parts.
            extra: what has a state that follows steps, such as a scheduler, by name: ranks that join have it, and checkpoints; a loss takes it back.
            lr_scaling: factor of the learning rates for a batch of k times batch_size: "sqrt", "linear" (moved to in an epoch), or a function of k.
        Raises:
            ConfigError: before the first step. StateError: no optimizer is managed, ranks were not started as an elastic job, or that has had a loop.
        """
        _check(self, dataset, batch_size, parts, ends=(total, epochs))
        _check_more(batch, batch_size, max_batch, lr_scaling, extra)
        if self.resizing is None and parts > 1:  # what is added to is not rounded first
            self._parts.events.late_planes.widen_gradients()
        if self.resizing is not None:
            self.resizing.job.begins_loop()
            self.resizing.job.offer(range(batch_size, (max_batch or 0) + 1, batch_size // parts))
        draws = Draws(
            SampleOrder(len(dataset), seed),
            each=batch_size // parts,
            batches=((0, batch_size),),
            seed=seed,
            steps=total,
            samples=float(epochs or 0) * len(dataset),
            lr_scaling=LR_SCALING[lr_scaling] if isinstance(lr_scaling, str) else lr_scaling,
            warm_up=len(dataset) if lr_scaling == "linear" else 0,
        )
        load = partial(load_batches, dataset=dataset, collate_fn=collate_fn, num_workers=num_workers)
        return StepsToDo(self, draws, load, extra)


def _check_more(
    batch: str, batch_size: int, max_batch: int | None, lr_scaling: object, extra: Mapping[str, Any]
) -> None:
    problems = [
        f"extra[{name!r}]={type(value).__name__}: state_dict() and load_state_dict() are expected"
        for name, value in extra.items()
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict"))
    ]
    if batch not in ("fixed", "grow"):
        problems.append(f'batch={batch!r}: "fixed" or "grow" is expected')
    elif (batch == "grow") != (max_batch is not None) or (max_batch or batch_size) < batch_size:
        problems.append(
            f'max_batch={max_batch}: batch="grow" has one, of at least batch_size={batch_size}, and "fixed" has none'
        )
    if not callable(lr_scaling) and lr_scaling not in LR_SCALING:
        problems.append(f"lr_scaling={lr_scaling!r}: one of {', '.join(LR_SCALING)}, or a function is expected")
    refuse(problems, of="steps")


def _check(session: ElasticSession, dataset: Any, batch_size: int, parts: int, *, ends: tuple[object, object]) -> None:
    problems = []
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        problems.append(
            f"dataset={type(dataset).__name__}: a map-style dataset is expected, with a length and samples by number"
        )
    elif not len(dataset):
        problems.append("dataset: it has no samples")
    if parts < 1 or batch_size < 1 or batch_size % max(parts, 1):
        problems.append(f"batch_size={batch_size}: a multiple of parts={parts} is expected")
    if sum(end is not None for end in ends) != 1:
        problems.append(f"total={ends[0]}, epochs={ends[1]}: one of them is expected")
    if session.resizing is not None and parts < session.resizing.job.most:
        problems.append(f"parts={parts}: as many as the job may have ranks are expected, {session.resizing.job.most}")
    if session.is_member and session._parts.training.in_backward:
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
