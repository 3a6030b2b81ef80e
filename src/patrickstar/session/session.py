"""A session: a model and an optimizer under management, from `manage` to `close`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor

from patrickstar.checkpoint.lazy_state_dict import LazyStateDict
from patrickstar.core.layout import Layout
from patrickstar.core.trace import Trace
from patrickstar.errors import ConfigError, RankError, StateError
from patrickstar.memory.device_failure import noticed_at
from patrickstar.optim.managed import ManagedOptimizer
from patrickstar.plan.plan import Plan
from patrickstar.session.close import Closing
from patrickstar.session.elastic_session import ElasticSession
from patrickstar.session.parts import Parts
from patrickstar.session.saving import Saving
from patrickstar.session.stats import Stats, gather_stats
from patrickstar.step.training import Training
from patrickstar.units import parse_size

_OTHERS_COME_S: Final = 10.0


class Session(ElasticSession):
    """A model and an optimizer under management, made by `patrickstar.manage`. Use as a context manager, or call `close()`.

    `layout`: which parameter lies in which chunk; `layout.padding` is the share of chunk space unused.
    """

    def __init__(self, parts: Parts | None, layout: Layout, closing: Callable[..., Closing] | None) -> None:
        super().__init__(parts, closing)
        self.layout = layout
        self.optimizer: ManagedOptimizer | None = None
        """The optimizer to step with: it shares `param_groups` with the one passed to `manage`. None where there was none."""

        self.scaler: torch.amp.GradScaler = torch.amp.GradScaler("cpu", enabled=False)
        """Scales losses, with the interface of `torch.amp.GradScaler`: `scaler.scale(loss).backward()`, `scaler.step(optimizer)`,
        `scaler.update()`. Disabled unless the precision is fp16: then these do no more than the plain calls."""

        self._closing: Closing | None = None

    def __repr__(self) -> str:
        if not self.is_member:
            return "<Session of an elastic job, not one of its ranks now>"
        model = type(self._parts.model).__name__
        return f"<Session of {model}, {len(self._parts.named)} parameters{', closed' if self._parts.events.is_closed else ''}>"

    @property
    def plan(self) -> Plan | None:
        """The plan of the last training step's forward and backward; None before the first, and where there was none."""
        stretch = self._parts.stretches.training
        return None if stretch is None else stretch.plan

    @property
    def trace(self) -> Trace | None:
        """The trace that `plan` was made from."""
        stretch = self._parts.stretches.training
        return None if stretch is None else stretch.trace

    # numbers

    def stats(self) -> Stats:
        """Numbers of what has happened so far."""
        self._parts.expect_open()
        return gather_stats(self._parts)

    # gradients

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the global norm of all gradients: returns the norm before (0-dim, fp32), as `torch.nn.utils.clip_grad_norm_` does."""
        return self._training().clip(max_norm)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, gradient in fp32) of every parameter that has one, one at a time: a copy, or the user's own tensor where that is fp32."""
        found, mesh = self._training().gradients(), self._parts.mesh
        return found if mesh is None else ((name, mesh.whole(name, gradient)) for name, gradient in found)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context whose backwards add gradients on this rank alone, as DDP's: those of all ranks are added by the first backward after it.

        On all ranks alike. One process has nothing to leave out.
        """
        gathering = self._training().gathering
        with nullcontext() if gathering is None else gathering.postponing():
            yield

    # state

    def write(self, name: str, tensor: Tensor) -> None:
        """Sets a parameter's value, of a model in blocks from the whole tensor."""
        self._parts.begin_access()
        self._parts.weights.write(name, tensor if self._parts.mesh is None else self._parts.mesh.own(name, tensor))

    def state_dict(self) -> Mapping[str, Tensor]:
        """The keys of `model.state_dict()`, parameters in fp32; each tensor is read when it is asked for."""
        self._parts.expect_open()
        parts = self._parts
        entries = parts.model.state_dict(keep_vars=True)
        names = parts.binding.names

        def read(key: str) -> Tensor:
            self._parts.begin_access()
            value = entries[key]
            name = names.get(id(value))
            if name is not None:
                return parts.weights.read(name) if parts.mesh is None else parts.mesh.read(name)
            return value.detach() if isinstance(value, Tensor) else value

        return LazyStateDict(entries, read)

    def load_state_dict(self, mapping: Mapping[str, Tensor]) -> None:
        """Takes over weights and persistent buffers. All keys of `model.state_dict()`, no others.

        Raises:
            ConfigError: missing or unexpected keys, or other shapes. Nothing has changed then.
        """
        self._parts.begin_access()
        parts = self._parts
        entries = parts.model.state_dict(keep_vars=True)
        missing = [key for key in entries if key not in mapping]
        unexpected = [key for key in mapping if key not in entries]
        if missing or unexpected:
            raise ConfigError(
                f"load_state_dict: missing keys {missing[:5]}, unexpected keys {unexpected[:5]}; nothing was loaded"
            )
        names = parts.binding.names
        tensors = {key: entry for key, entry in entries.items() if isinstance(entry, Tensor)}
        for key, entry in tensors.items():
            value, name = mapping[key], names.get(id(entry))
            shape = tuple(entry.shape) if name is None else parts.shape(parts.binding.by_name[name])
            if value.shape != shape:
                raise ConfigError(
                    f"load_state_dict: {key} has shape {tuple(value.shape)}, the model's {shape}; nothing was loaded"
                )
        for key, entry in tensors.items():
            name = names.get(id(entry))
            if name is not None:
                self.write(name, mapping[key])
            else:
                with torch.no_grad():
                    entry.copy_(mapping[key])

    def save_checkpoint(
        self,
        dir: str | Path,  # noqa: A002 - the name users type
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        *,
        keep: int | None = None,
    ) -> Path:
        """Writes `dir/step-00000012/` and moves `dir/latest`; returns the first. Of several ranks all do, in a directory that all see.

        Args:
            extra: JSON values, tensors, and objects with `state_dict`, such as a scheduler or a data loader; of several ranks, rank 0's.
            wait: only True until checkpoints can be written in the background.
            keep: how many of the newest stay; None: all.
        Raises:
            DeviceError: it cannot be written; what was written before is intact.
            CheckpointError: `torch.load(weights_only=True)` could not read something in `extra` back; nothing was written.
        """
        self._parts.begin_access()
        if wait is not True:
            raise ConfigError("wait=False: checkpoints are written in the background in a later version; leave it out")
        self._parts.expect_whole_model()
        return self._saving().save(Path(dir), self.steps_done, extra=dict(extra or {}), keep=keep)

    def load_checkpoint(self, dir: str | Path) -> Any:  # noqa: A002 - the name users type
        """Takes over `dir/latest`, or one step's directory, and gives back `extra`: containers and tensors, `state_dict`s as plain values.

        Any number of ranks takes what any other has saved.

        Raises:
            CheckpointError: it is damaged or of another model. Nothing has changed then.
        """
        self._parts.begin_access()
        step, extra = self._saving().load(Path(dir))
        self._steps_before = step - self._parts.stretches.counts.steps
        return extra

    def export(self, dir: str | Path, *, max_shard_size: int | str = "5GB") -> None:  # noqa: A002 - the name users type
        """Writes the weights to `dir` as the model's own library reads them: safetensors with index and configuration.

        Parameters are in fp32, tied ones stand there once. Written aside first; other files in `dir` stay. A model of no library has its
        tensors written and no configuration. Of several ranks all export.

        Args:
            max_shard_size: of one file, unless a tensor is larger.
        Raises:
            DeviceError: it cannot be written; a model that was there is as before, unless renaming fails half way. ConfigError: no such size.
        """
        self._parts.begin_access()
        shard_bytes = parse_size(max_shard_size, name="max_shard_size")
        self._parts.expect_whole_model()
        self._saving().export(Path(dir), shard_bytes=shard_bytes)

    def _saving(self) -> Saving:
        groups = None if self.optimizer is None else self.optimizer.param_groups
        return Saving(self._parts, groups, self.scaler)

    def _training(self) -> Training:
        parts = self._parts
        parts.expect_open()
        if self.optimizer is None:
            raise StateError("this session manages weights only: pass an optimizer to manage()")
        return parts.training

    # the end

    def close(self, *, keep_weights: bool = True) -> None:
        """Gives the model ordinary parameters with the current weights, in the types they had before. A second call does nothing.

        Args:
            keep_weights: False: the weights are not wanted; parameters become meta tensors, at once and without a warning.
        Raises:
            DeviceError: the disk or the device does not give weights back. What was read stays; another call tries the rest, or gives them up.
            RankError: other ranks do something else, or are gone: the session is closed, and parameters are meta tensors.
        """
        if not self.is_member or self._parts.events.is_closed:
            return
        self._parts.training.completing = lambda: None  # a step that was left is not gone on with
        self._parts.events.check_watch()
        self._parts.binding.whole.take_back()
        if self._closing is None:
            assert self._make_closing is not None, "there are parts, and nothing that closes them"
            self._closing = self._make_closing(optimizer=self.optimizer, keep_weights=keep_weights)
        elif not keep_weights:
            self._closing.give_up()
        lost: RankError | None = None
        with noticed_at("close()"):
            try:
                self._closing.run()
            except RankError as error:
                lost = error
                self._closing.give_up()
                self._closing.run()
        self._parts.events.is_closed = True
        self._parts.events.session_name = repr(self)
        if self.unclosed is not None:
            self.unclosed.detach()
        if lost is not None:
            raise lost

    def __enter__(self) -> Session:
        if self.is_member:
            self._parts.expect_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        collectives = self._parts.everyone if self.is_member else None
        if error is not None and collectives is not None and not self._parts.events.is_closed:
            # Whoever has no such error is told of it: only all together have the weights.
            with suppress(RankError):
                collectives.agree(b"", f"close after {type(error).__name__}", within_s=_OTHERS_COME_S)
        try:
            self.close()
        except RankError:
            if error is None:
                raise
