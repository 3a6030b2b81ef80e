"""Updates of the optimizer's step, chunk by chunk: at `step()`, or as gradients arrive."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from patrickstar.core.formats import SessionFormats
from patrickstar.core.layout import Layout, aligned
from patrickstar.core.machine import Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, REST, WEIGHT, PlaneRef
from patrickstar.core.trace import Phase, Touch, Trace
from patrickstar.memory.lanes import Task
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.norm import Norm, norm_of
from patrickstar.optim.passes import Passes
from patrickstar.parameters.bound import BoundParameter
from patrickstar.plan.touches import gradient_parts, update_parts
from patrickstar.step.executor import Executor
from patrickstar.step.overflow import OverflowFlag, read
from patrickstar.step.pending_step import Factors, PendingStep
from patrickstar.step.precision import torch_type
from patrickstar.step.whole_updates import Arrival
from patrickstar.torch_private import one_thread_here

__all__ = ["Updates"]


@dataclass(frozen=True, slots=True)
class _Range:
    """Adjacent elements of a chunk that are updated alike."""

    start: int
    stop: int
    hyper: Hyper
    step: int
    factors: tuple[Tensor, ...]

    def goes_on(self, start: int, hyper: Hyper, step: int, factors: tuple[Tensor, ...]) -> bool:
        """Tells whether elements from `start` on are updated as those of this range."""
        alike = len(factors) == len(self.factors) and all(map(operator.is_, factors, self.factors))
        return alike and (self.stop, self.hyper, self.step) == (start, hyper, step)


@dataclass(frozen=True, slots=True)
class _Planes:
    """A chunk's part of the weight's run and its other planes, as 1-D tensors, and what updates them."""

    weight: Tensor
    rest: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    passes: Passes

    def update(
        self, span: slice, gradient: Tensor, *, step: int, hyper: Hyper, factors: tuple[Tensor, ...] = ()
    ) -> None:
        """Updates these elements from their gradient, which stays as it is, scaled by the factors first."""
        self.passes.update(
            self.weight[span],
            None if self.rest is None else self.rest[span],
            gradient,
            self.exp_avg[span],
            self.exp_avg_sq[span],
            step=step,
            hyper=hyper,
            factors=factors,
        )


class Updates:
    """Updates weights and moments where they lie.

    Args:
        passes: by type of device. bump: is given the names of parameters whose values have changed. formats: which chunks have a split master.
        device: where norms are taken; None: on the CPU.
    """

    def __init__(
        self,
        layout: Layout,
        executor: Executor,
        passes: Mapping[str, Passes],
        bump: Callable[[Iterable[str]], None],
        *,
        formats: SessionFormats,
        device: torch.device | None = None,
    ) -> None:
        self._layout = layout
        self._executor = executor
        self._passes = passes
        self._device = device
        self._bump = bump
        self._formats = formats

    def work(self, order: PendingStep, chunk: int, tier: Tier) -> Task:
        """The work of a chunk's update, from its accumulated gradient or from the order's: each parameter once, whoever asks for it how often.

        In a chunk, adjacent parameters with the same hyper-parameters and step count are one run of the kernel, the zeros between them
        included: a zero whose averages and gradient are zero stays zero.
        """
        touches = order.waiting[chunk].touches
        with self._executor.quiet():  # an evaluation may be what has this done, in inference mode
            units = {touch.ref: self._executor.store.operand(touch.ref, tier) for touch in touches}
            planes, pieces = self._planes(chunk, units), self._pieces(chunk, order, units)
        is_fp32 = planes.rest is None and all(gradient.dtype is torch.float32 for _, gradient in pieces)
        in_blocks = not is_fp32 or any(piece.factors for piece, _ in pieces)
        # Block by block, a team of threads would be woken ten times a block on cores that another team keeps: decision 0043.
        is_alone = in_blocks and self._device is None

        def update() -> None:
            if not order.begin(chunk):
                return
            began = time.perf_counter()
            try:
                with self._executor.quiet(), one_thread_here() if is_alone else nullcontext():
                    for piece, gradient in pieces:
                        span = slice(piece.start, piece.stop)
                        planes.update(span, gradient, step=piece.step, hyper=piece.hyper, factors=piece.factors)
            except BaseException as error:
                order.failed = error
                raise
            finally:
                order.end(chunk, time.perf_counter() - began)

        return update

    def _pieces(self, chunk: int, order: PendingStep, units: Mapping[PlaneRef, Tensor]) -> list[tuple[_Range, Tensor]]:
        """The ranges of a chunk that are updated, each with its gradient."""
        if order.gradients is None:
            grad = units[PlaneRef(chunk, GRAD)]
            return [(piece, grad[piece.start : piece.stop]) for piece in self._ranges(chunk, order)]
        found = []
        for piece in order.pieces(self._layout, chunk):
            span = slice(piece.tensor_start, piece.tensor_start + piece.stop - piece.start)
            alone = _Range(piece.start, piece.stop, order.hypers[piece.name], order.steps[piece.name], ())
            found.append((alone, order.gradients[piece.name][span]))
        return found

    def over(self, order: PendingStep) -> None:
        """Notes that an order is carried out."""
        if not order.is_woven:
            self._bump(order.hypers)

    def update_now(
        self,
        bound: BoundParameter,
        gradient: Tensor,
        *,
        hyper: Hyper,
        step: int,
        gather: Callable[[Arrival], bool],
    ) -> None:
        """Updates one parameter, or tile, from a gradient that has just arrived and is its whole gradient, but for what `gather` has taken."""
        name = bound.name
        with self._executor.apart():
            # As it would come out of its plane, whenever the update is done.
            form = self._formats.now.of(PlaneRef(bound.ref.chunk, GRAD), self._layout)
            flat = bound.flat(gradient).to(torch_type(form))
            for part, touches in update_parts(self._layout, name, formats=self._formats.now):
                piece = flat[part.tensor_start : part.tensor_start + part.stop - part.start]
                if not gather(Arrival(bound, part, piece, hyper, step)):
                    planes = self._planes(part.chunk, self._units(Phase.BACKWARD, name, touches))
                    planes.update(slice(part.start, part.stop), piece, step=step, hyper=hyper)
        self._bump([name])

    def norm(self, names: Iterable[str], factors: Factors, trace: Trace, flags: Sequence[OverflowFlag]) -> Tensor:
        """The global norm of these parameters' gradients, each multiplied with its factors first: 0-dim, fp32.

        `trace`: the moments that read them, which say on which tier. `flags`: are read with it, so that the host waits for a device once.
        """
        wanted = set(names)
        by_unit = {touch.ref: (touch,) for moment in trace.moments for touch in moment.touches}
        norm: Norm | None = None
        with self._executor.apart():
            for name in self._layout.slices:
                if name in wanted:
                    for part, touches in gradient_parts(self._layout, name, writes=False):
                        here = by_unit.get(touches[0].ref, touches)
                        (unit,) = self._executor.use(Phase.STEP, name, here)
                        norm = norm or self._norm()  # not before there is room for its scratch
                        norm.add(unit[part.start : part.stop], factors.get(name, ()))
                    if norm is not None:
                        norm.end_tensor()
            return norm_of(read(flags, (norm or self._norm()).numbers()))

    def norm_of(self, gradients: Mapping[str, Tensor], flags: Sequence[OverflowFlag]) -> Tensor:
        """The global norm of gradients that are tensors of their own: by name, 1-D in slot order. `flags`: as in `norm`."""
        norm = self._norm()
        with self._executor.apart():
            for name in self._layout.slices:
                if name in gradients:
                    norm.add(gradients[name])
                    norm.end_tensor()
            return norm_of(read(flags, norm.numbers()))

    def _norm(self) -> Norm:
        if self._device is None:
            return self._passes["cpu"].norm(None)
        return self._passes[self._device.type].norm(self._device, largest=self._layout.largest_numel)

    def _units(self, phase: Phase, label: str, touches: Sequence[Touch]) -> dict[PlaneRef, Tensor]:
        """The units that a moment touches, resident."""
        return dict(zip((touch.ref for touch in touches), self._executor.use(phase, label, touches), strict=True))

    def _planes(self, chunk: int, units: Mapping[PlaneRef, Tensor]) -> _Planes:
        head = self._layout.run_of(chunk).head
        numel = self._layout.chunk_numel
        weight = units[PlaneRef(head, WEIGHT)][(chunk - head) * numel : (chunk - head + 1) * numel]
        return _Planes(
            weight,
            units.get(PlaneRef(chunk, REST)),
            units[PlaneRef(chunk, EXP_AVG)],
            units[PlaneRef(chunk, EXP_AVG_SQ)],
            self._passes[weight.device.type],
        )

    def _ranges(self, chunk: int, order: PendingStep) -> list[_Range]:
        ranges: list[_Range] = []
        for piece in order.pieces(self._layout, chunk):
            hyper = order.hypers[piece.name]
            step, stop, factors = order.steps[piece.name], aligned(piece.stop), order.factors.get(piece.name, ())
            if ranges and ranges[-1].goes_on(piece.start, hyper, step, factors):
                ranges[-1] = replace(ranges[-1], stop=stop)
            else:
                ranges.append(_Range(piece.start, stop, hyper, step, factors))
        return ranges
