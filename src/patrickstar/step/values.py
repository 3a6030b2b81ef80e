"""Values of parameters by name, read and written wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from patrickstar.core.layout import Layout, Part
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, REST, STEP, PlaneRef
from patrickstar.core.trace import Phase, Touch
from patrickstar.deferred.recording import DeferredRecorder
from patrickstar.errors import ConfigError
from patrickstar.memory.leases import AssembledKey
from patrickstar.optim.masters import blocks, join, rest_type, split
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import BoundParameter
from patrickstar.plan.touches import master_touches
from patrickstar.step.executor import Executor
from patrickstar.step.late_planes import LatePlanes

_BLOCK_NUMEL = 1 << 18
"""Elements of a 16-bit parameter whose masters are in memory at once, 1 MiB of them: a chunk's would take twice what its weights do."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Reads and writes values of parameters, and the averages that Adam keeps (its moments), one at a time."""

    binding: Binding
    layout: Layout
    executor: Executor
    late_planes: LatePlanes

    def read(self, name: str) -> Tensor:
        """A copy of a parameter's master, of its shape and strides, fp32."""
        return self._whole(name, self.master_pieces(name))

    def _whole(self, name: str, pieces: Iterator[Tensor]) -> Tensor:
        bound = self.binding.by_name[name]
        with self.executor.lock, self.executor.apart():
            whole = torch.empty_strided(bound.shape_only.shape, bound.shape_only.stride(), device="cpu")
            flat, at = bound.flat(whole), 0
            with self.executor.room.making(whole.nbytes):
                for piece in pieces:
                    flat[at : at + piece.numel()].copy_(piece)
                    at += piece.numel()
            return whole

    def master_pieces(self, name: str) -> Iterator[Tensor]:
        """A parameter's master as 1-D fp32 pieces on the host in slot order; each valid until the next is asked for, and not to be written."""
        bound = self.binding.by_name[name]
        self.binding.changes.look(bound)
        for part in self.layout.parts(name):
            weight, rest = self._halves(bound.name, part, writes=False)
            if weight.dtype is torch.float32:
                yield weight.cpu()
                continue
            for block in blocks(weight.numel(), of=_BLOCK_NUMEL):
                master = torch.empty(block.stop - block.start, device="cpu")
                if rest is None:
                    master.copy_(weight[block])
                else:
                    join(weight[block].cpu(), rest[block].cpu(), master)
                yield master

    def read_into(self, name: str, part: Part, read: Callable[[Tensor, int], object]) -> None:
        """Sets a piece of a parameter's master from what `read` writes: into an fp32 tensor, from an element of the parameter on."""
        weight, rest = self._halves(name, part, writes=True)
        if weight.dtype is torch.float32 and weight.is_cpu:
            read(weight, part.tensor_start)
            return
        for block in blocks(weight.numel(), of=_BLOCK_NUMEL):
            master = torch.empty(block.stop - block.start, device="cpu")
            read(master, part.tensor_start + block.start)
            if weight.dtype is torch.float32:
                weight[block].copy_(master)
                continue
            halves = (weight, rest)
            upper, left = (
                half[block]
                if half is not None and half.is_cpu
                else torch.empty(master.shape, dtype=dtype, device="cpu")
                for half, dtype in zip(halves, (weight.dtype, rest_type(weight.dtype)), strict=True)
            )
            split(master, upper, left)
            for half, made in zip(halves, (upper, left), strict=True):
                if half is not None and not half.is_cpu:
                    half[block].copy_(made)

    def _halves(self, name: str, part: Part, *, writes: bool) -> tuple[Tensor, Tensor | None]:
        """A piece of the weight plane, and of the rest plane where there is one."""
        rest = PlaneRef(part.chunk, REST)
        is_split = rest in self.executor.store.state.home
        touches = master_touches(part, self.layout, is_split=is_split, writes=writes)
        units = self.executor.use_where_it_is(Phase.STEP, name, touches)
        ref, start = self.layout.weight_place(part)
        found = dict(zip((touch.ref for touch in touches), units, strict=True))
        weight = found[ref][start : start + part.stop - part.start]
        return weight, found[rest][part.start : part.stop] if is_split else None

    def write(self, name: str, value: Tensor) -> None:
        """Sets a parameter's value, rounded to fp32. Counts as a change in place. ConfigError: no such parameter, or another shape."""
        bound = self.binding.by_name.get(name)
        if bound is None:
            raise ConfigError(f"there is no parameter {name!r}")
        if value.shape != bound.shape_only.shape:
            raise ConfigError(f"{name} has shape {tuple(bound.shape_only.shape)}, the value {tuple(value.shape)}")
        with self.executor.lock:
            with self.executor.quiet():
                self.fill(bound, value)
            self.binding.changes.renew([name])

    def fill(self, bound: BoundParameter, value: Tensor) -> None:
        """Copies a value into a parameter's place, a piece at a time."""
        flat = bound.flat(value.detach())
        for part in self.layout.parts(bound.name):
            self.read_into(bound.name, part, lambda master, at: master.copy_(flat[at : at + master.numel()]))

    def fill_made(self, bound: BoundParameter, recorder: DeferredRecorder) -> None:
        """Fills a parameter's place with a value that is made now: in that place if it can be, else slots leave room for the value first."""
        on_host = self.binding.device is None or self.binding.device.type == "cpu"  # a device would draw other numbers
        can = on_host and not bound.tiles and self.executor.store.units.dtype(bound.ref) is torch.float32
        if can and recorder.can_make_in(bound.parameter, torch.float32):
            (unit,) = self.executor.use(Phase.STEP, bound.name, (Touch(bound.ref, True),))
            recorder.make_in(bound.parameter, unit[bound.offset : bound.offset + bound.shape_only.numel()])
            return
        with self.executor.room.making(bound.parameter.nbytes):
            self.executor.open()
            self.fill(bound, recorder.value(bound.parameter))

    def average_pieces(self, name: str, plane: str, *, writes: bool = False) -> Iterator[Tensor]:
        """A parameter's `exp_avg` or `exp_avg_sq` as 1-D pieces in slot order; each valid until the next is asked for.

        They are on the host, but for those that are to be written, which are where they are.
        """
        assert plane in (EXP_AVG, EXP_AVG_SQ)
        self.late_planes.thaw(name)
        for part in self.layout.parts(name):
            ref = PlaneRef(part.chunk, plane)
            (unit,) = self.executor.use_where_it_is(Phase.STEP, name, (Touch(ref, writes),))
            piece = unit[part.start : part.stop]
            yield piece if writes else piece.cpu()

    def read_average(self, name: str, plane: str) -> Tensor:
        """A copy of a parameter's `exp_avg` or `exp_avg_sq`, of its shape and strides."""
        return self._whole(name, self.average_pieces(name, plane))

    def copy_average_into(self, name: str, plane: str, flat: Tensor) -> None:
        """Writes a parameter's `exp_avg` or `exp_avg_sq` into a 1-D fp32 tensor in slot order."""
        at = 0
        for piece in self.average_pieces(name, plane):
            flat[at : at + piece.numel()].copy_(piece)
            at += piece.numel()

    def clear_averages(self, name: str) -> None:
        """Sets a parameter's averages to zero, as before its first update."""
        with self.executor.lock, self.executor.quiet():
            for plane in (EXP_AVG, EXP_AVG_SQ):
                for target in self.average_pieces(name, plane, writes=True):
                    target.zero_()
        for plane in (EXP_AVG, EXP_AVG_SQ, STEP):
            self.binding.assembled.dropped(AssembledKey(name, plane), "the optimizer's state of it was released")

    def write_average(self, name: str, plane: str, value: Tensor) -> None:
        """Sets a parameter's `exp_avg` or `exp_avg_sq`, rounded to fp32."""
        bound = self.binding.by_name[name]
        with self.executor.lock, self.executor.quiet():
            self.write_average_from(name, plane, bound.flat(value.to(torch.float32)))
        self.binding.assembled.changed(AssembledKey(name, plane))

    def write_average_from(self, name: str, plane: str, flat: Tensor) -> None:
        """Sets a parameter's `exp_avg` or `exp_avg_sq` from a 1-D fp32 tensor in slot order."""
        at = 0
        for target in self.average_pieces(name, plane, writes=True):
            target.copy_(flat[at : at + target.numel()])
            at += target.numel()
