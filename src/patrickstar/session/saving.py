"""Checkpoints of a session: weights, moments and all else that stopping and resuming must not change; exports of the model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from patrickstar.checkpoint import rng
from patrickstar.checkpoint.export import write_model
from patrickstar.checkpoint.naming import describe, own_keys
from patrickstar.checkpoint.reader import StepReader, open_step
from patrickstar.checkpoint.shards import Writers
from patrickstar.checkpoint.storage import write_step
from patrickstar.checkpoint.tensors import TensorEntry
from patrickstar.comm.all_ranks import AllRanks
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, WEIGHT
from patrickstar.errors import CheckpointError
from patrickstar.optim.user_optimizer import restore_groups
from patrickstar.parameters.bound import BoundParameter
from patrickstar.session.buffers import persistent_buffers
from patrickstar.session.delivery import Delivery, Kept, MeshDelivery
from patrickstar.session.loading import tensors_of
from patrickstar.session.parts import Parts

_log = logging.getLogger("patrickstar")
_EXACT_IN_FP32 = (torch.bfloat16, torch.float16)
_MOMENTS = (EXP_AVG, EXP_AVG_SQ)


class _Saved(NamedTuple):
    """A tensor of a checkpoint: what it is, and where its values are."""

    entry: TensorEntry
    source: Kept | Tensor


@dataclass(frozen=True, slots=True)
class Saving:
    """Writes and reads checkpoints, and exports the model, a piece at a time; of several ranks, all do.

    Attributes:
        parts: of the session. live_groups: the optimizer's parameter groups, or None. scaler: scales losses.
    """

    parts: Parts
    live_groups: list[dict[str, Any]] | None
    scaler: torch.amp.GradScaler

    @property
    def all_ranks(self) -> AllRanks:
        """The ranks that share the model."""
        return AllRanks(self.parts.everyone)

    def save(self, directory: Path, step: int, *, extra: object, keep: int | None = None) -> Path:
        """Writes `directory/step-...` and moves `latest`. DeviceError where it cannot be written; nothing is lost by that."""
        self.parts.executor.settle()
        tensors, live = self._tensors(self.parts.steps), self.live_groups
        delivery = self._delivery(tensors)
        own, *others = rng.capture_all(self.all_ranks, self.parts.binding.device)
        state: dict[str, Any] = {
            "steps": dict(self.parts.steps),
            "rng": own,
            "rng_of_other_ranks": others,
            "groups": None
            if live is None
            else [{key: group[key] for key in group if key != "params"} for group in live],
            "group_parameters": self._group_parameters(),
            "scaler": self.scaler.state_dict(),
        }
        with self.parts.executor.lock, self.parts.executor.quiet():
            return write_step(
                directory,
                step,
                entries=[saved.entry for saved in tensors.values()],
                read=delivery.read,
                parameters=self._shapes(),
                state=state,
                extra=extra,
                keep=keep,
                writers=self._writers(delivery),
            )

    def load(self, path: Path) -> tuple[int, object]:
        """Takes over a checkpoint: (step, extra). CheckpointError before anything has changed where it is not whole or not of this model."""
        do, what = self.all_ranks.do, "load_checkpoint()"
        with ExitStack() as stack:
            reader = do(what, lambda: stack.enter_context(self._open(path)))
            reader.verify(self.all_ranks)
            tensors = do(f"{what}: a look at the values", lambda: self._check(reader, reader.values["state"]))
            state = reader.values["state"]
            do(f"{what}: weights and moments", lambda: self._take_tensors(reader, tensors, state["steps"]))
            live = self.live_groups
            if live is not None and state["groups"] is not None:
                restore_groups(live, {"param_groups": state["groups"]})
            if self.scaler.is_enabled() and state.get("scaler"):  # from fp16 to fp16; another precision has none
                self.scaler.load_state_dict(state["scaler"])
            if (states := self._random_states(state)) is None:
                _log.warning(
                    "%s was saved by fewer ranks and has no random state of rank %d, which keeps its own",
                    path,
                    self.all_ranks.rank,
                )
            else:
                rng.restore(states, self.parts.binding.device)
            return reader.step, reader.values["extra"]

    def export(self, directory: Path, *, shard_bytes: int) -> None:
        """Writes parameters in fp32, persistent buffers in the type they have, and the configuration. DeviceError: it cannot be written."""
        model, binding = self.parts.model, self.parts.binding
        tensors = tensors_of(model)
        kept = own_keys(model, tensors)
        found: dict[str, _Saved] = {}
        for keys, tensor in tensors.items():
            if key := kept.get(keys):
                bound = binding.by_name.get(binding.names.get(id(tensor), ""))
                if bound is None:
                    found[key] = _Saved(TensorEntry(key, tensor.dtype, tuple(tensor.shape)), tensor)
                else:
                    entry = TensorEntry(key, torch.float32, self.parts.shape(bound))
                    found[key] = _Saved(entry, Kept(WEIGHT, bound))
        delivery = self._delivery(found)
        with self.parts.executor.lock, self.parts.executor.quiet():
            write_model(
                directory,
                [saved.entry for saved in found.values()],
                read=delivery.read,
                describe=lambda to: describe(model, torch.float32, to),
                shard_bytes=shard_bytes,
                writers=self._writers(delivery),
            )

    def _delivery(self, tensors: Mapping[str, _Saved]) -> Delivery:
        kind = Delivery if self.parts.mesh is None else MeshDelivery
        return kind(self.parts, {name: saved.source for name, saved in tensors.items()})

    def _writers(self, delivery: Delivery) -> Writers:
        """The ranks, of which each reads what it writes from this delivery; buffers are rank 0's."""
        buffers = [name for name, source in delivery.sources.items() if isinstance(source, Tensor)]
        return Writers(self.all_ranks, delivery.rounds, frozenset(buffers))

    def _tensors(self, updated: Collection[str]) -> dict[str, _Saved]:
        """The tensors of a checkpoint, by name, in the order in which they lie. `updated`: the parameters that have moments."""
        places = self.parts.layout.slices
        bound_in_order = sorted(
            self.parts.binding, key=lambda bound: (places[bound.name].chunk, places[bound.name].offset)
        )
        buffers = persistent_buffers(self.parts.model)
        found = [self._saved(WEIGHT, bound) for bound in bound_in_order]
        for name, buffer in buffers.items():
            entry = TensorEntry(f"buffer/{name}", buffer.dtype, tuple(buffer.shape), "buffers")
            found.append(_Saved(entry, buffer))
        found += [self._saved(plane, bound) for plane in _MOMENTS for bound in bound_in_order if bound.name in updated]
        return {saved.entry.name: saved for saved in found}

    def _saved(self, plane: str, bound: BoundParameter) -> _Saved:
        stem = "weights" if plane == WEIGHT else "moments"
        entry = TensorEntry(f"{plane}/{bound.name}", torch.float32, self.parts.shape(bound), stem)
        return _Saved(entry, Kept(plane, bound))

    def _open(self, path: Path) -> StepReader:
        reader = open_step(path)
        reader.require_model(self._shapes())
        return reader

    def _take_tensors(self, reader: StepReader, tensors: Mapping[str, _Saved], steps: Mapping[str, int]) -> None:
        """Takes over weights, moments, buffers and counts of updates: of several ranks, each what it keeps."""
        self.parts.end_step()
        with self.parts.executor.lock, self.parts.executor.quiet():
            for name in reader.spans:
                self._take(reader, name, tensors[name].source)
            for name in set(self.parts.steps) - set(steps):
                self.parts.weights.clear_averages(name)
        self.parts.steps.clear()
        self.parts.steps.update(steps)
        self.parts.binding.changes.stepped(self.parts.binding.by_name)

    def _take(self, reader: StepReader, name: str, source: Kept | Tensor) -> None:
        if isinstance(source, Tensor):
            source.copy_(reader.read(name))
            return
        (plane, bound), mesh = source, self.parts.mesh
        if mesh is not None:
            block = mesh.block(bound.name, lambda strip, at: reader.read_into(name, strip, start=at))
            self.parts.weights.fill(bound, block, plane)
        elif bound.shape_only.is_contiguous():
            self.parts.weights.read_into(bound.name, lambda kept, at: reader.read_into(name, kept, start=at), plane)
        else:
            self.parts.weights.fill(bound, reader.read(name), plane)

    def _random_states(self, state: Mapping[str, Any]) -> object | None:
        """The random states of this rank in a checkpoint; None where fewer ranks have saved it."""
        of_all = [state["rng"], *state.get("rng_of_other_ranks", ())]
        return of_all[self.all_ranks.rank] if self.all_ranks.rank < len(of_all) else None

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {bound.name: self.parts.shape(bound) for bound in self.parts.binding}

    def _group_parameters(self) -> list[list[str]]:
        names = self.parts.binding.names
        return [[names[id(parameter)] for parameter in group["params"]] for group in self.live_groups or ()]

    def _check(self, reader: StepReader, state: object) -> dict[str, _Saved]:
        """The tensors of this session that a checkpoint with such a state has. CheckpointError: it has others."""
        where = reader.path
        if (
            not isinstance(state, dict)
            or {"steps", "rng", "groups", "group_parameters"} - set(state)
            or not isinstance(state["steps"], dict)
            or not isinstance(state.get("rng_of_other_ranks", []), list)
        ):
            raise CheckpointError(f"{where}: its state is not that of a session")
        steps = state["steps"]
        if not all(name in self.parts.binding.by_name and isinstance(count, int) for name, count in steps.items()):
            raise CheckpointError(f"{where}: its counts of updates are not of this model's parameters")
        tensors = self._tensors(steps)
        wanted = {name: saved.entry.shape for name, saved in tensors.items()}
        found = {name: span.shape for name, span in reader.spans.items()}
        if wanted != found:
            odd = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
            raise CheckpointError(f"{where}: a checkpoint of another model or precision: {', '.join(odd[:4])} differ")
        for name, span in reader.spans.items():
            expected = tensors[name].entry.dtype
            is_exact = expected is torch.float32 and span.dtype in _EXACT_IN_FP32
            if span.dtype is not expected and not is_exact:
                raise CheckpointError(
                    f"{where}: {name} is {span.dtype}, expected {expected}: a checkpoint of another precision"
                )
        self._check_groups(where, state["groups"], state["group_parameters"])
        if (states := self._random_states(state)) is not None:
            rng.check(states, self.parts.binding.device)
        return tensors

    def _check_groups(self, where: Path, groups: list[object] | None, parameters: list[list[str]]) -> None:
        live = self.live_groups
        if live is None or groups is None:
            return
        if len(groups) != len(live):
            raise CheckpointError(
                f"{where}: saved with {len(groups)} parameter groups, the optimizer has {len(live)}: "
                "build the groups as they were when it was saved"
            )
        for number, (saved, present) in enumerate(zip(parameters, self._group_parameters(), strict=True)):
            if saved != present:
                odd = sorted(set(saved) ^ set(present)) or present
                raise CheckpointError(
                    f"{where}: parameter group {number} had other parameters when it was saved ({', '.join(odd[:4])}): "
                    "build the groups as they were then"
                )
