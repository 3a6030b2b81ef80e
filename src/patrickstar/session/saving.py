"""Checkpoints of a session: weights, moments and everything else that stopping and resuming must not change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from patrickstar.checkpoint import rng
from patrickstar.checkpoint.find import open_step
from patrickstar.checkpoint.reader import StepReader
from patrickstar.checkpoint.storage import write_step
from patrickstar.checkpoint.tensors import TensorEntry
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ
from patrickstar.errors import CheckpointError
from patrickstar.optim.state import restore_groups
from patrickstar.session.buffers import persistent_buffers
from patrickstar.session.parts import Parts

_EXACT_IN_FP32 = (torch.bfloat16, torch.float16)
_PLANES = MappingProxyType({"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ})


@dataclass(frozen=True, slots=True)
class Saving:
    """Writes and reads checkpoints, a piece at a time.

    Attributes:
        parts: of the session. live_groups: the optimizer's parameter groups, or None. scaler: scales losses.
    """

    parts: Parts
    live_groups: list[dict[str, Any]] | None
    scaler: torch.amp.GradScaler

    def save(self, directory: Path, step: int, *, extra: object, keep: int | None = None) -> Path:
        """Writes `directory/step-...` and moves `latest`. DeviceError where it cannot be written; nothing is lost by that."""
        self.parts.executor.settle()
        buffers = persistent_buffers(self.parts.model)
        entries = [
            TensorEntry(f"weight/{b.name}", torch.float32, tuple(b.shape_only.shape), "weights")
            for b in self.parts.binding
        ]
        entries += [TensorEntry(f"buffer/{name}", t.dtype, tuple(t.shape), "buffers") for name, t in buffers.items()]
        for bound in self.parts.binding:
            if bound.name in self.parts.steps:
                shape = tuple(bound.shape_only.shape)
                entries += [TensorEntry(f"{kind}/{bound.name}", torch.float32, shape, "moments") for kind in _PLANES]
        live = self.live_groups
        state: dict[str, Any] = {
            "steps": dict(self.parts.steps),
            "rng": rng.capture(self.parts.binding.device),
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
                entries=entries,
                read=lambda name: self._pieces(name, buffers),
                parameters=self._shapes(),
                state=state,
                extra=extra,
                keep=keep,
            )

    def load(self, path: Path) -> tuple[int, object]:
        """Takes over a checkpoint: (step, extra). CheckpointError before anything has changed where it is not whole or not of this model."""
        with open_step(path) as reader:
            reader.require_model(self._shapes())
            reader.verify()
            state, extra = reader.values["state"], reader.values["extra"]
            buffers = persistent_buffers(self.parts.model)
            steps = self._check(reader, state, buffers)
            assert isinstance(state, dict)
            self._forget()
            with self.parts.executor.lock, self.parts.executor.quiet():
                for name in reader.spans:
                    kind, _, owner = name.partition("/")
                    if kind == "buffer":
                        buffers[owner].copy_(reader.read(name))
                    elif kind == "weight":
                        self._read_weight(reader, name, owner)
                    else:
                        self._read_average(reader, name, owner, _PLANES[kind])
                for name in set(self.parts.steps) - set(steps):
                    self.parts.weights.clear_averages(name)
            self.parts.steps.clear()
            self.parts.steps.update(steps)
            self.parts.binding.changes.stepped(self.parts.binding.by_name)
            live = self.live_groups
            if live is not None and state["groups"] is not None:
                restore_groups(live, {"param_groups": state["groups"]})
            if self.scaler.is_enabled() and state.get("scaler"):  # from fp16 to fp16; another precision has none
                self.scaler.load_state_dict(state["scaler"])
            rng.restore(state["rng"], self.parts.binding.device)
            return reader.step, extra

    def _forget(self) -> None:
        """Ends what is under way, and lets gradients go: everything is about to be loaded anew."""
        self.parts.executor.settle()
        self.parts.stretches.end()
        training = self.parts.training
        if training is not None:
            training.zero_grad(set_to_none=True)
            training.forget_unfinished()

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {bound.name: tuple(bound.shape_only.shape) for bound in self.parts.binding}

    def _group_parameters(self) -> list[list[str]]:
        names = self.parts.binding.names
        return [[names[id(parameter)] for parameter in group["params"]] for group in self.live_groups or ()]

    def _check(self, reader: StepReader, state: object, buffers: Mapping[str, Tensor]) -> dict[str, int]:
        where = reader.path
        if (
            not isinstance(state, dict)
            or {"steps", "rng", "groups", "group_parameters"} - set(state)
            or not isinstance(state["steps"], dict)
        ):
            raise CheckpointError(f"{where}: its state is not that of a session")
        steps = state["steps"]
        if not all(name in self.parts.binding.by_name and isinstance(count, int) for name, count in steps.items()):
            raise CheckpointError(f"{where}: its counts of updates are not of this model's parameters")
        wanted = {f"weight/{bound.name}": tuple(bound.shape_only.shape) for bound in self.parts.binding}
        wanted |= {f"{kind}/{name}": wanted[f"weight/{name}"] for name in steps for kind in _PLANES}
        wanted |= {f"buffer/{name}": tuple(buffer.shape) for name, buffer in buffers.items()}
        found = {name: span.shape for name, span in reader.spans.items()}
        if wanted != found:
            odd = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
            raise CheckpointError(f"{where}: a checkpoint of another model or precision: {', '.join(odd[:4])} differ")
        for name, span in reader.spans.items():
            kind, _, owner = name.partition("/")
            expected = buffers[owner].dtype if kind == "buffer" else torch.float32
            if span.dtype is not expected and not (expected is torch.float32 and span.dtype in _EXACT_IN_FP32):
                raise CheckpointError(
                    f"{where}: {name} is {span.dtype}, expected {expected}: a checkpoint of another precision"
                )
        self._check_groups(where, state["groups"], state["group_parameters"])
        rng.check(state["rng"], self.parts.binding.device)
        return steps

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

    def _pieces(self, name: str, buffers: Mapping[str, Tensor]) -> Iterator[Tensor]:
        kind, _, owner = name.partition("/")
        if kind == "buffer":
            yield buffers[owner].detach().cpu().contiguous().reshape(-1)
            return
        if kind == "weight":
            yield from self.parts.weight_pieces(owner)
        elif not self.parts.binding.by_name[owner].shape_only.is_contiguous():
            yield self.parts.weights.read_average(owner, _PLANES[kind]).contiguous().reshape(-1)
        else:
            yield from self.parts.weights.average_pieces(owner, _PLANES[kind])

    def _read_weight(self, reader: StepReader, name: str, owner: str) -> None:
        bound = self.parts.binding.by_name[owner]
        if not bound.shape_only.is_contiguous():
            self.parts.weights.fill(bound, reader.read(name))
            return
        for part in self.parts.layout.parts(owner):
            self.parts.weights.read_into(owner, part, lambda master, at: reader.read_into(name, master, start=at))

    def _read_average(self, reader: StepReader, name: str, owner: str, plane: str) -> None:
        if not self.parts.binding.by_name[owner].shape_only.is_contiguous():
            self.parts.weights.write_average(owner, plane, reader.read(name))
            return
        at = 0
        for target in self.parts.weights.average_pieces(owner, plane, writes=True):
            here = target if target.is_cpu else torch.empty(target.shape, device="cpu")
            reader.read_into(name, here, start=at)
            if here is not target:
                target.copy_(here)
            at += target.numel()
