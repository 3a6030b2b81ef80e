"""The optimizer's step, chunk by chunk: at `step()`, or as gradients arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from patrickstar.core.layout import Layout, aligned
from patrickstar.core.plane import EXP_AVG, EXP_AVG_SQ, GRAD, WEIGHT, PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.nn.bound import BoundParameter
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.kernel import Kernel
from patrickstar.optim.norm import GlobalNorm
from patrickstar.runtime.conductor import Conductor

__all__ = ["StepOrder", "Updates", "norm_trace", "step_trace"]


@dataclass(frozen=True, slots=True)
class StepOrder:
    """What `optimizer.step()` asked for, as things stood then.

    Attributes:
        hypers: the hyper-parameters of each parameter that is updated, by name.
        steps: the number of this update for each of them, from 1.
        factors: clip factors to multiply the gradients with first.
    """

    hypers: Mapping[str, Hyper]
    steps: Mapping[str, int]
    factors: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class _Range:
    """Adjacent elements of a chunk that are updated alike."""

    start: int
    stop: int
    hyper: Hyper
    step: int


def step_trace(layout: Layout, names: Iterable[str], *, writes_gradients: bool, with_gradient: bool = True) -> Trace:
    """The moments of an update of these parameters: one for each chunk that holds a piece of one.

    Args:
        writes_gradients: whether they are scaled in place first. with_gradient: False where gradients never come to their plane.
    """
    moments = []
    for chunk, label in _chunks_of(layout, set(names)):
        weight = Touch(PlaneRef(layout.run_of(chunk).head, WEIGHT), True)
        touches = [Touch(PlaneRef(chunk, EXP_AVG), True), Touch(PlaneRef(chunk, EXP_AVG_SQ), True), weight]
        if with_gradient:
            touches.append(Touch(PlaneRef(chunk, GRAD), writes_gradients))
        moments.append(Moment(Phase.STEP, label, tuple(sorted(touches, key=lambda touch: touch.ref))))
    return Trace(tuple(moments))


def norm_trace(layout: Layout, names: Iterable[str]) -> Trace:
    """The moments of a pass that reads these parameters' gradients, in layout order."""
    wanted = set(names)
    return Trace(
        tuple(
            Moment(Phase.STEP, name, (Touch(PlaneRef(part.chunk, GRAD)),))
            for name in layout.slices
            if name in wanted
            for part in layout.parts(name)
        )
    )


def _chunks_of(layout: Layout, names: set[str]) -> Iterable[tuple[int, str]]:
    for chunk in range(layout.n_chunks):
        label = next((piece.name for piece in layout.tensors_in(chunk) if piece.name in names), None)
        if label is not None:
            yield chunk, label


class Updates:
    """Updates weights and moments where they lie.

    Args:
        bump: is given the names of parameters whose values have changed.
    """

    def __init__(
        self, layout: Layout, conductor: Conductor, kernel: Kernel, bump: Callable[[Iterable[str]], None]
    ) -> None:
        self._layout = layout
        self._conductor = conductor
        self._kernel = kernel
        self._bump = bump

    def step(self, order: StepOrder, trace: Trace, *, frees: Mapping[int, PlaneRef]) -> None:
        """Updates every parameter of the order from its accumulated gradient.

        In a chunk, adjacent parameters with the same hyper-parameters and step count are one run of the kernel, the zeros between them
        included: a zero with zero moments and a zero gradient stays zero.

        Args:
            trace: `step_trace` of these parameters. frees: units nobody wants after the moment of that number.
        """
        with self._conductor.apart():
            for index, (chunk, moment) in enumerate(self._moments(order, trace)):
                self._conductor.moment(moment.phase, moment.label, moment.touches)
                weight, grad, exp_avg, exp_avg_sq = self._planes(chunk)
                for piece in self._ranges(chunk, order):
                    span = slice(piece.start, piece.stop)
                    for factor in order.factors:
                        grad[span].mul_(factor)
                    self._kernel.update(
                        weight[span], grad[span], exp_avg[span], exp_avg_sq[span], step=piece.step, hyper=piece.hyper
                    )
                if index in frees:
                    self._conductor.mover.forget(frees[index])
        self._bump(order.hypers)

    def step_with(self, order: StepOrder, trace: Trace, gradients: Mapping[str, Tensor]) -> None:
        """The same from gradients that are tensors of their own: by name, 1-D in slot order."""
        with self._conductor.apart():
            for chunk, moment in self._moments(order, trace):
                self._conductor.moment(moment.phase, moment.label, moment.touches)
                weight, exp_avg, exp_avg_sq = self._planes(chunk, with_gradient=False)
                for piece in self._layout.tensors_in(chunk):
                    if piece.name in order.hypers:
                        span = slice(piece.start, piece.stop)
                        gradient = gradients[piece.name][
                            piece.tensor_start : piece.tensor_start + piece.stop - piece.start
                        ]
                        step, hyper = order.steps[piece.name], order.hypers[piece.name]
                        self._kernel.update(
                            weight[span], gradient, exp_avg[span], exp_avg_sq[span], step=step, hyper=hyper
                        )
        self._bump(order.hypers)

    def _moments(self, order: StepOrder, trace: Trace) -> Iterator[tuple[int, Moment]]:
        chunks = (chunk for chunk, _ in _chunks_of(self._layout, set(order.hypers)))
        return zip(chunks, trace.moments, strict=True)

    def update_now(self, bound: BoundParameter, gradient: Tensor, *, hyper: Hyper, step: int) -> None:
        """Updates one parameter from a gradient that has just arrived and is its whole gradient."""
        name = bound.name
        weight_ref = self._layout.weight_unit(name)
        with self._conductor.apart():
            flat = bound.flat(gradient)
            for part in self._layout.parts(name):
                touches = (
                    Touch(PlaneRef(part.chunk, EXP_AVG), True),
                    Touch(PlaneRef(part.chunk, EXP_AVG_SQ), True),
                    Touch(weight_ref, True),
                )
                self._conductor.moment(Phase.BACKWARD, name, tuple(sorted(touches, key=lambda touch: touch.ref)))
                weight, exp_avg, exp_avg_sq = self._planes(part.chunk, with_gradient=False)
                span = slice(part.start, part.stop)
                piece = flat[part.tensor_start : part.tensor_start + part.stop - part.start]
                self._kernel.update(weight[span], piece, exp_avg[span], exp_avg_sq[span], step=step, hyper=hyper)
        self._bump([name])

    def norm(self, names: Iterable[str]) -> Tensor:
        """The global norm of these parameters' gradients: 0-dim, fp32."""
        wanted = set(names)
        norm = GlobalNorm()
        with self._conductor.apart():
            for name in self._layout.slices:
                if name in wanted:
                    for part in self._layout.parts(name):
                        ref = PlaneRef(part.chunk, GRAD)
                        self._conductor.moment(Phase.STEP, name, (Touch(ref),))
                        norm.add(self._conductor.tensor(ref)[part.start : part.stop])
                    norm.end_tensor()
            return norm.result()

    def norm_of(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The global norm of gradients that are tensors of their own: by name, 1-D in slot order."""
        norm = GlobalNorm()
        with self._conductor.apart():
            for name in self._layout.slices:
                if name in gradients:
                    norm.add(gradients[name])
                    norm.end_tensor()
            return norm.result()

    def _planes(self, chunk: int, *, with_gradient: bool = True) -> tuple[Tensor, ...]:
        """The chunk's part of the weight's run, and its other planes, as 1-D tensors."""
        head = self._layout.run_of(chunk).head
        numel = self._layout.chunk_numel
        weight = self._conductor.tensor(PlaneRef(head, WEIGHT))[(chunk - head) * numel : (chunk - head + 1) * numel]
        planes = (GRAD, EXP_AVG, EXP_AVG_SQ) if with_gradient else (EXP_AVG, EXP_AVG_SQ)
        return (weight, *(self._conductor.tensor(PlaneRef(chunk, plane)) for plane in planes))

    def _ranges(self, chunk: int, order: StepOrder) -> list[_Range]:
        ranges: list[_Range] = []
        for piece in self._layout.tensors_in(chunk):
            hyper = order.hypers.get(piece.name)
            if hyper is None:
                continue
            step, stop = order.steps[piece.name], aligned(piece.stop)
            last = ranges[-1] if ranges else None
            if last is not None and last.stop == piece.start and (last.hyper, last.step) == (hyper, step):
                ranges[-1] = _Range(last.start, stop, hyper, step)
            else:
                ranges.append(_Range(piece.start, stop, hyper, step))
        return ranges
