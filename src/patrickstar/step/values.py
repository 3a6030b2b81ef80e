"""Values of parameters by name, read and written wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from patrickstar.core.layout import Layout, Part
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, REST, STEP, WEIGHT, PlaneRef
from patrickstar.core.trace import Phase, Touch
from patrickstar.deferred.recording import DeferredRecorder
from patrickstar.errors import ConfigError
from patrickstar.memory.leases import AssembledKey
from patrickstar.optim.masters import blocks, join, rest_type, split
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import BoundParameter
from patrickstar.plan.touches import master_touches
from patrickstar.step.executor import Executor
from patrickstar.step.gathering import Gathering
from patrickstar.step.late_planes import LatePlanes

_BLOCK_NUMEL = 1 << 18
"""Elements of a 16-bit parameter whose masters are in memory at once, 1 MiB of them: a chunk's would take twice what its weights do."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Reads and writes what is kept of parameters, one at a time: of the plane `WEIGHT` their masters, of others the averages of Adam; all fp32."""

    binding: Binding
    layout: Layout
    executor: Executor
    late_planes: LatePlanes
    gathering: Gathering | None = None

    def read(self, name: str, plane: str = WEIGHT) -> Tensor:
        """A copy, of the parameter's shape and strides."""
        bound = self.binding.by_name[name]
        with self.executor.lock, self.executor.apart():
            whole = torch.empty_strided(bound.shape_only.shape, bound.shape_only.stride(), device="cpu")
            with self.executor.room.making(whole.nbytes):
                self.copy_into(name, plane, bound.flat(whole))
            return whole

    def copy_into(self, name: str, plane: str, flat: Tensor) -> None:
        """Writes the values into a 1-D fp32 tensor in slot order."""
        if self.gathering is not None:
            self.gathering.assemble(name, self.pieces(name, plane), flat)
        else:
            put_together(flat, self.pieces(name, plane))

    def pieces(self, name: str, plane: str) -> Iterator[Tensor]:
        """The values as 1-D pieces on the host in slot order; each valid until the next is asked for, and not to be written."""
        if plane == WEIGHT:
            self.binding.changes.look(self.binding.by_name[name])
        for part in self.layout.parts(name):
            yield from self.pieces_of(name, part, plane)

    def pieces_of(self, name: str, part: Part, plane: str) -> Iterator[Tensor]:
        """The values in one chunk, as `pieces` gives them."""
        kept, rest = self._kept(name, part, plane, writes=False)
        if kept.dtype is torch.float32:
            yield kept.cpu()
            return
        for block in blocks(kept.numel(), of=_BLOCK_NUMEL):
            master = torch.empty(block.stop - block.start, device="cpu")
            if rest is None:
                master.copy_(kept[block])
            else:
                join(kept[block].cpu(), rest[block].cpu(), master)
            yield master

    def read_into(self, name: str, read: Callable[[Tensor, int], object], plane: str = WEIGHT) -> None:
        """Sets the values from what `read` writes, piece by piece: into an fp32 tensor on the host, from an element of the parameter on."""
        if self.gathering is not None and plane == WEIGHT:
            self.gathering.order.forget()
        for part in self.layout.parts(name):
            kept, rest = self._kept(name, part, plane, writes=True)
            if kept.dtype is torch.float32 and kept.is_cpu:
                read(kept, part.tensor_start)
                continue
            for block in blocks(kept.numel(), of=_BLOCK_NUMEL):
                master = torch.empty(block.stop - block.start, device="cpu")
                read(master, part.tensor_start + block.start)
                if kept.dtype is torch.float32:
                    kept[block].copy_(master)
                    continue
                upper, left = (torch.empty_like(master, dtype=dtype) for dtype in (kept.dtype, rest_type(kept.dtype)))
                split(master, upper, left)
                kept[block].copy_(upper)
                if rest is not None:
                    rest[block].copy_(left)

    def _kept(self, name: str, part: Part, plane: str, *, writes: bool) -> tuple[Tensor, Tensor | None]:
        """A piece of a plane, and of the rest plane where that is of split masters."""
        ref, rest, start = PlaneRef(part.chunk, plane), PlaneRef(part.chunk, REST), part.start
        if plane == WEIGHT:
            ref, start = self.layout.weight_place(part)
            is_split = rest in self.executor.store.state.home
            touches = master_touches(part, self.layout, is_split=is_split, writes=writes)
        else:
            self.late_planes.thaw(name)
            touches = (Touch(ref, writes),)
        units = self.executor.use_where_it_is(Phase.STEP, name, touches)
        found = dict(zip((touch.ref for touch in touches), units, strict=True))
        kept = found[ref][start : start + part.stop - part.start]
        return kept, found[rest][part.start : part.stop] if rest in found else None

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

    def write_average(self, name: str, plane: str, value: Tensor) -> None:
        """Sets a parameter's `exp_avg` or `exp_avg_sq`, rounded to fp32."""
        with self.executor.lock, self.executor.quiet():
            self.fill(self.binding.by_name[name], value, plane)
        self.binding.assembled.changed(AssembledKey(name, plane))

    def clear_averages(self, name: str) -> None:
        """Sets a parameter's averages to zero, as before its first update."""
        with self.executor.lock, self.executor.quiet():
            for plane in (EXP_AVG, EXP_AVG_SQ):
                self.read_into(name, lambda kept, _: kept.zero_(), plane)
        for plane in (EXP_AVG, EXP_AVG_SQ, STEP):
            self.binding.assembled.dropped(AssembledKey(name, plane), "the optimizer's state of it was released")

    def fill(self, bound: BoundParameter, value: Tensor, plane: str = WEIGHT) -> None:
        """Copies values into a parameter's place, a piece at a time."""
        self.fill_from(bound.name, bound.flat(value.detach()), plane)

    def fill_from(self, name: str, flat: Tensor, plane: str) -> None:
        """Copies the values of a 1-D tensor in slot order into a parameter's place."""
        self.read_into(name, lambda kept, at: kept.copy_(flat[at : at + kept.numel()]), plane)

    def fill_made(self, bound: BoundParameter, recorder: DeferredRecorder) -> None:
        """Fills a parameter's place with a value that is made now: in that place if it can be, else slots leave room for the value first."""
        on_host = self.binding.device is None or self.binding.device.type == "cpu"  # a device would draw other numbers
        can = (
            on_host
            and not bound.tiles
            and self.gathering is None
            and self.executor.store.units.dtype(bound.ref) is torch.float32
        )
        if can and recorder.can_make_in(bound.parameter, torch.float32):
            (unit,) = self.executor.use(Phase.STEP, bound.name, (Touch(bound.ref, True),))
            recorder.make_in(bound.parameter, unit[bound.offset : bound.offset + bound.shape_only.numel()])
            return
        with self.executor.room.making(bound.parameter.nbytes):
            self.executor.open()
            self.fill(bound, recorder.value(bound.parameter))


def put_together(flat: Tensor, pieces: Iterable[Tensor]) -> None:
    """Writes pieces one after another into a 1-D tensor."""
    at = 0
    for piece in pieces:
        flat[at : at + piece.numel()].copy_(piece)
        at += piece.numel()
