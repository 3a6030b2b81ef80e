"""The optimizer's step: who makes an order of it, and who does the update of each chunk. See Note [Pending step] in `pending_step.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from patrickstar.core.layout import ALIGNMENT, Layout, Part
from patrickstar.core.machine import Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, REST, WEIGHT, PlaneRef
from patrickstar.core.trace import Phase, Touch
from patrickstar.errors import StateError
from patrickstar.memory.interruptions import InterruptionsPutOff
from patrickstar.memory.lanes import Task
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.passes import Passes
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import BoundParameter
from patrickstar.plan.planner import Planner
from patrickstar.plan.stretch import StretchKind
from patrickstar.plan.touches import update_touches
from patrickstar.step.executor import Executor
from patrickstar.step.gradients import Gradients
from patrickstar.step.pending_step import Alike, Doer, PendingStep
from patrickstar.step.precision import torch_type
from patrickstar.step.stretches import Stretches
from patrickstar.step.whole import Whole
from patrickstar.torch_private import one_thread_here

_Planes = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""A chunk's part of the weight's run, its rest where that is split, and its averages, as 1-D tensors."""

_Piece = tuple[slice, Tensor, Tensor, Tensor]
"""Elements of a parameter in one chunk: which, and where they and their averages lie, as 1-D tensors."""


@dataclass(kw_only=True, eq=False)
class OptimizerStep(Doer):
    """Updates weights and moments where they lie, when the executor says that it is time.

    Attributes:
        in_chunks: the gradients in the plane. planner: has the traces of updates. passes: by type of device.
        whole: the parameters as long as they keep their bytes.
        steps: updates so far, by parameter name; a parameter that was never updated has no entry.
        seconds: duration of the last step. is_half_done: whether one has failed half way.
        make_fit: has gradients of a parameter be kept in the type of one of the user's own.
    """

    binding: Binding
    layout: Layout
    executor: Executor
    stretches: Stretches
    in_chunks: Gradients
    planner: Planner
    passes: Mapping[str, Passes]
    whole: Whole

    steps: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    is_half_done: bool = False
    make_fit: Callable[[BoundParameter, Tensor], None] = field(init=False)
    _places: dict[str, tuple[dict[PlaneRef, int], list[_Piece]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        in_chunks = self.in_chunks  # through it, this must not hold itself
        self.make_fit = lambda bound, gradient: in_chunks.make_fit(bound, gradient.dtype)

    def order(self, names: Collection[str], hypers: Mapping[str, Hyper]) -> PendingStep:
        """A step of these parameters, as things stand now, which counts as one of each from here on."""
        for name in names:
            self.steps[name] = self.steps.get(name, 0) + 1
        taken, level, factors = self.binding.taken_bytes(), self.executor.room.level_bytes, self.in_chunks.factors
        state = self.executor.store.state
        trace = self.planner.placed_updates(names, state, taken_bytes=taken, level_bytes=level)
        alike = {name: (self.steps[name], hypers[name], factors.get(name, ())) for name in names}
        return PendingStep(self, alike, trace)

    def carry_out(self, order: PendingStep) -> None:
        self.stretches.begin_update(order)
        for moment in tuple(order.waiting.values()):
            self.executor.update(moment)
        if self.executor.pilot.stretch.kind is StretchKind.UPDATE:  # it has one of its own
            self.stretches.end()
            for gradient in sorted(filter(self.executor.store.state.is_free, order.frees)):
                self.executor.release(gradient)

    def over(self, order: PendingStep) -> None:
        self.is_half_done |= order.failed is not None
        self.seconds = order.seconds
        if not order.is_woven:
            self.binding.changes.stepped(order.alike)

    def work(self, order: PendingStep, chunk: int, tier: Tier) -> Task:
        """The work of a chunk's update, from its accumulated gradient: each parameter once, whoever asks for it how often.

        In a chunk, adjacent parameters with the same hyper-parameters and step count are one run of the kernel, the zeros between them
        included: a zero whose averages and gradient are zero stays zero.
        """
        touches = order.waiting[chunk].touches
        with self.executor.quiet():  # an evaluation may be what has this done, in inference mode
            units = {touch.ref: self.executor.store.operand(touch.ref, tier) for touch in touches}
            planes, grad = self._planes(chunk, units), units[PlaneRef(chunk, GRAD)]
            pieces = [(span, grad[span], alike) for span, alike in self._ranges(chunk, order)]
        is_fp32 = planes[1] is None and grad.dtype is torch.float32
        in_blocks = not is_fp32 or any(factors for _, _, (_, _, factors) in pieces)
        # Block by block, a team of threads would be woken ten times a block on cores that another team keeps: decision 0043.
        is_alone = in_blocks and self.binding.device is None

        def update() -> None:
            if not order.begin(chunk):
                return
            began = time.perf_counter()
            try:
                with self.executor.quiet(), one_thread_here() if is_alone else nullcontext():
                    for span, gradient, alike in pieces:
                        self._update(planes, span, gradient, alike)
            except BaseException as error:
                order.failed = error
                raise
            finally:
                order.end(chunk, time.perf_counter() - began)

        return update

    def update_now(
        self,
        bound: BoundParameter,
        gradient: Tensor | None,
        *,
        hyper: Hyper,
        gather: Callable[[BoundParameter, Part, Tensor, Hyper], bool] = lambda *_: False,
    ) -> None:
        """Updates one parameter, or tile, from its whole gradient, but for what `gather` has taken. `gradient`: None where it lies in its plane."""
        name, formats = bound.name, self.planner.formats.now
        self.binding.changes.look(bound)
        with self.executor.apart():
            # As it would come out of its plane, whenever the update is done.
            form = formats.of(PlaneRef(bound.ref.chunk, GRAD), self.layout)
            flat = None if gradient is None else bound.flat(gradient).to(torch_type(form))
            for part in self.layout.parts(name):
                kept = PlaneRef(part.chunk, GRAD)
                touches = update_touches(part.chunk, self.layout, formats, *([Touch(kept)] if flat is None else []))
                span, tensor_stop = slice(part.start, part.stop), part.tensor_start + part.stop - part.start
                piece = None if flat is None else flat[part.tensor_start : tensor_stop]
                if piece is not None and gather(bound, part, piece, hyper):
                    continue
                found = self.executor.use(Phase.BACKWARD, name, touches)
                units = {touch.ref: unit for touch, unit in zip(touches, found, strict=True)}
                alike = self.steps[bound.owner], hyper, self.in_chunks.factors.get(name, ())
                here = units[kept][span] if piece is None else piece
                self._update(self._planes(part.chunk, units), span, here, alike)
        self.binding.changes.stepped([name])

    def update_at_once(self, names: Collection[str], hypers: Mapping[str, Hyper], *, as_made: bool = False) -> None:
        """Updates parameters from the gradients that they have, and counts it: those of fp32 that keep their bytes together.

        `as_made`: whether gradients are as autograd has made them, and rounded; those of the user's own are not.

        Raises:
            StateError: a gradient is sparse. BudgetError: there is no room for averages. Nothing has changed then.
        """
        by_name, formats = self.binding.by_name, self.planner.formats.now
        by_use, splits = self.whole.why, REST in formats.planes
        apart = {
            name: self.binding.gradients.own_of(name)
            for name in names
            if by_use
            or name in self.in_chunks.names
            or by_name[name].is_copied
            or (splits and formats.is_split(by_name[name].ref.chunk, self.layout))
        }
        own = {name: gradient for name, gradient in apart.items() if gradient is not None}
        for name, there in own.items():
            expect_dense(name, there)
        for name, there in own.items() if not as_made else ():
            self.make_fit(by_name[name], there)
        for name in own if by_use else ():
            for part in self.layout.parts(name):
                touches = update_touches(part.chunk, self.layout, self.planner.formats.now)
                self.executor.pilot.decided(Phase.STEP, name, touches, self.executor.store.leases.held())
        leaving = self.executor.room.making(self.planner.update_bytes) if by_use else nullcontext()
        with self.executor.lock, leaving, InterruptionsPutOff():  # half way weights would be of no one step
            self._update_together([name for name in names if name not in apart], hypers)
            self.is_half_done = bool(apart)
            for name, gradient in apart.items():
                self.steps[name] = self.steps.get(name, 0) + 1
                self.update_now(by_name[name], gradient, hyper=hypers[name])
            self.is_half_done = False

    def _update_together(self, names: Collection[str], hypers: Mapping[str, Hyper]) -> None:
        """Updates parameters that keep their bytes. BudgetError: there is no room for the averages of a first update. Nothing has changed then."""
        alike: dict[tuple[Hyper, int], list[tuple[Tensor, ...]]] = {}
        by_name, steps = self.binding.by_name, self.steps
        device = "cpu" if self.binding.device is None else self.binding.device.type
        with self.executor.apart():
            for name in names:
                bound = by_name[name]
                gradient = bound.tensor().grad
                assert gradient is not None, f"{name} has no gradient"
                expect_dense(name, gradient)
                flat = bound.flat(gradient)
                planes = alike.setdefault((hypers[name], steps.get(name, 0) + 1), [])
                for span, weight, exp_avg, exp_avg_sq in self._pieces(name):
                    planes.append((weight, flat[span], exp_avg, exp_avg_sq))
            for (hyper, step), planes in alike.items():
                self.passes[device].update_all(planes, step=step, hyper=hyper)
            for name in names:
                steps[name] = steps.get(name, 0) + 1
        self.binding.changes.stepped(names)

    def _pieces(self, name: str) -> list[_Piece]:
        """The pieces of a parameter, with averages of zero where it has had none."""
        slots, known = self.executor.store.units.slots_here, self._places.get(name)
        if known is not None and known[0].items() <= slots.items():  # else these tensors are of others now
            return known[1]
        self.in_chunks.late_planes.thaw(name)
        where, found = self._places[name] = dict[PlaneRef, int](), list[_Piece]()
        for part in self.layout.parts(name):
            averages = [PlaneRef(part.chunk, plane) for plane in (EXP_AVG, EXP_AVG_SQ)]
            exp_avg, exp_avg_sq = self.executor.use(Phase.STEP, name, [Touch(ref, True) for ref in averages])
            weight, start = self.layout.weight_place(part)
            numel, own = part.stop - part.start, slice(part.start, part.stop)
            where.update((ref, slots[ref]) for ref in averages)
            span, unit = slice(part.tensor_start, part.tensor_start + numel), self.executor.store.tensor(weight)
            found.append((span, unit[start : start + numel], exp_avg[own], exp_avg_sq[own]))
        return found

    def _planes(self, chunk: int, units: Mapping[PlaneRef, Tensor]) -> _Planes:
        head, numel = self.layout.run_of(chunk).head, self.layout.chunk_numel
        weight = units[PlaneRef(head, WEIGHT)][(chunk - head) * numel : (chunk - head + 1) * numel]
        averages = units[PlaneRef(chunk, EXP_AVG)], units[PlaneRef(chunk, EXP_AVG_SQ)]
        return weight, units.get(PlaneRef(chunk, REST)), *averages

    def _update(self, planes: _Planes, span: slice, gradient: Tensor, alike: Alike) -> None:
        (weight, rest, exp_avg, exp_avg_sq), (step, hyper, factors) = planes, alike
        own = weight[span], None if rest is None else rest[span], gradient, exp_avg[span], exp_avg_sq[span]
        self.passes[weight.device.type].update(*own, step=step, hyper=hyper, factors=factors)

    def _ranges(self, chunk: int, order: PendingStep) -> list[tuple[slice, Alike]]:
        """Adjacent elements of a chunk that are updated alike."""
        ranges, following = list[tuple[slice, Alike]](), tuple[object, ...]()
        for piece in order.pieces(self.layout, chunk):
            start, stop = piece.start, piece.stop + -piece.stop % ALIGNMENT
            step, hyper, factors = alike = order.alike[piece.name]
            key = step, hyper, *map(id, factors)
            if (start, *key) == following:
                start = ranges.pop()[0].start
            ranges.append((slice(start, stop), alike))
            following = stop, *key
        return ranges


def expect_dense(name: str, gradient: Tensor) -> None:
    """Raises StateError where a gradient is sparse."""
    if gradient.layout is not torch.strided:
        raise StateError(
            f"{name} has a gradient that is not dense: sparse gradients cannot be managed; use sparse=False"
        )
