"""Training with `step="deferred"`: gradients are kept, added up and clipped, and `step()` notes the updates, which are done when they must be."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from patrickstar.core.planes import WEIGHT
from patrickstar.core.trace import Phase, Trace
from patrickstar.errors import BudgetError, StateError
from patrickstar.memory.device_failure import noticed_at
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.norm import GlobalNorm, clip_factor, norm_of
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import BoundParameter
from patrickstar.plan.touches import gradient_parts
from patrickstar.step.gradients import Gradients
from patrickstar.step.mesh_ranks import MeshRanks
from patrickstar.step.overflow import OverflowFlag, names_of, read
from patrickstar.step.training import Training
from patrickstar.torch_private import Plain, backward_id

_IN_PARTS = (
    "{} has two gradients in one backward, or in two without a forward or a step in between (re-entrant checkpointing): they would not be added up "
    "as 16 bits have them. Call checkpoint() with use_reentrant=False"
)


@dataclass(eq=False)
class SixteenBitGradients:
    """Puts gradients into chunks when they become more than 16 bits hold: before a second backward adds to them, and before they are multiplied.

    Attributes:
        in_chunks: the gradients there. came: those of this backward that stay as autograd makes them, by name, and their versions.
    """

    binding: Binding
    in_chunks: Gradients

    came: dict[str, int] = field(default_factory=dict)
    _made: dict[str, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)  # by those before, in order

    def comes(self, name: str) -> None:
        """Makes way for a gradient that autograd is about to add to `p.grad`. StateError: it is a second part of one."""
        bound, gradients = self.binding.by_name[name], self.binding.gradients
        gradients.hide([bound])
        if name in self.came:
            raise StateError(_IN_PARTS.format(name))
        own = self._made_by_autograd(name)
        if own is not None:
            self._put_in_chunk(bound, own)
        if gradients.own_of(name) is None:  # else autograd adds to one that was assigned
            self.came[name] = 0

    def arrived(self, bound: BoundParameter, gradient: Tensor) -> None:
        """Takes a gradient that is in `p.grad`: adds it to what is in chunks, or leaves it, rounded to the type that is kept."""
        if bound.name in self.in_chunks.names:
            bound.parameter.grad = None
            self.in_chunks.add(bound, gradient)
            self.binding.gradients.show([bound])
        elif bound.name in self.came:
            kept = self.in_chunks.dtype(bound)
            if kept.itemsize < gradient.dtype.itemsize:
                # Parts of one tensor count their changes together: each is to have a count of its own.
                if gradient.untyped_storage().nbytes() > gradient.nbytes:
                    bound.parameter.grad = gradient = gradient.data
                with self.in_chunks.executor.quiet():
                    gradient.copy_(gradient.to(kept))
            self.came[bound.name] = gradient._version

    def backward_ended(self) -> None:
        """Notes that what has come is whole."""
        for name, version in self.came.items():
            own = self.binding.gradients.own_of(name)
            if own is not None:
                self._made[name] = weakref.ref(own), version
        self.came.clear()

    def take_back(self) -> None:
        """Takes over what has become of `p.grad` of gradients in chunks: zeroed, or another. StateError where it is of half a backward."""
        if not self.binding.gradients.shown.keys() >= {self.binding.by_name[name] for name in self.in_chunks.names}:
            raise StateError(
                "an exception ended a backward that added to gradients: some have what it brought, others have not. Call optimizer.zero_grad()"
            )
        self.binding.gradients.take_back()

    def put_in_chunks(self) -> None:
        """Puts what autograd has made into chunks: it is about to be more than it shows."""
        for name in list(self._made):
            own = self._made_by_autograd(name)
            if own is not None:
                with Plain():
                    self._put_in_chunk(self.binding.by_name[name], own)
                    self.binding.gradients.show([self.binding.by_name[name]])

    def make_fit(self, bound: BoundParameter, own: Tensor) -> None:
        """Has gradients be kept in the type of one that was assigned, or changed by hand: it is not rounded."""
        if self._made_by_autograd(bound.name) is not own or own._version != self._made[bound.name][1]:
            self.in_chunks.make_fit(bound, own.dtype)

    def _made_by_autograd(self, name: str) -> Tensor | None:
        """The gradient, where it is what autograd has made in a backward before."""
        own = self.binding.gradients.own_of(name)
        return own if own is not None and name in self._made and self._made[name][0]() is own else None

    def _put_in_chunk(self, bound: BoundParameter, own: Tensor) -> None:
        self.make_fit(bound, own)
        bound.parameter.grad = None
        del self._made[bound.name]
        self.in_chunks.add(bound, own)
        self.in_chunks.whole.add(bound.name)


@dataclass(kw_only=True, eq=False)
class DeferredTraining(Training):
    """Training with gradients that are kept until `step()`. See Note [Pending step].

    Attributes:
        max_grad_norm: clipping at every step, or None. mesh: of a model in blocks: all ranks that have some.
    """

    in_backward = False

    max_grad_norm: float | None
    mesh: MeshRanks | None = None

    _norm: Tensor | None = None  # of the gradients as they are, taken before `step`

    def __post_init__(self) -> None:
        self._narrow = SixteenBitGradients(self.binding, self.in_chunks)
        self.binding.gradients.comes = partial(DeferredTraining._comes, weakref.proxy(self))
        self.whole.leaving, self.updates.make_fit = self._narrow.put_in_chunks, self._narrow.make_fit

    def gradient(self, name: str, gradient: Tensor) -> None:
        """Takes a gradient that has arrived, which autograd keeps where nothing has to move."""
        if self._bringing != backward_id():
            self.notice_backward()
        if self.binding.gradients.stay:
            self._narrow.arrived(self.binding.records[name], gradient)
        else:
            self._keep(self.binding.records[name], gradient)

    def _comes(self, name: str) -> None:
        self.notice_backward()
        self._narrow.comes(name)

    def _backward_ends(self, inside: bool) -> None:
        super()._backward_ends(inside)
        if not inside and self._narrow.came:
            self._narrow.backward_ended()

    def _forget_backward(self) -> None:
        super()._forget_backward()
        self._narrow.came.clear()

    def _expect_gradients(self) -> None:
        """Makes ready for a use of all gradients. StateError where they are not those of whole backwards, of all ranks."""
        self.executor.settle()
        self.completing()
        if self.gathering is not None:
            if self.gathering.postpones:
                raise StateError(
                    "inside of session.no_sync() gradients are this rank's own: call optimizer.step(), clip and read them outside of it"
                )
            if self.gathering.kept:
                self.gathering.end_backward()
        if self.binding.gradients.stay:
            if backward_id() == -1:
                self._forget_backward()
            self._narrow.take_back()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        self._expect_gradients()
        return self._gradients()

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, bound in self.binding.by_name.items():
            own = self.binding.gradients.own_of(name)
            if own is not None:
                yield name, own.to(torch.float32)
            elif name in self.in_chunks.names:
                yield name, self.in_chunks.read(bound)

    def clip(self, max_norm: float) -> Tensor:
        self._expect_gradients()
        norm, self._norm = self._norm, None
        if norm is None:
            norm = self._take_norm(self.in_chunks.overflow.flags())
        self.multiply(clip_factor(max_norm, norm))
        return norm

    def _take_norm(self, flags: Sequence[OverflowFlag]) -> Tensor:
        """The global norm of all gradients: 0-dim, fp32. `flags`: are read with it, so that the host waits for a device once."""
        counted = [name for name in self.layout.slices if self.mesh is None or name in self.mesh.counted]
        own = {name: gradient for name, gradient in self.binding.gradients.owned() if name in counted}
        chunked = [name for name in counted if name in self.in_chunks.names]
        stay, trace = self.binding.gradients.stay, Trace(())
        if not stay:
            try:
                trace = self.stretches.begin_norm(self.updates.planner.norm_trace(chunked))
            except BudgetError as refusal:
                raise refusal if self.gathering is None else self.gathering.refused(refusal) from None
            if own:  # which no trace has
                with self.executor.room.making(self.updates.planner.norm_bytes):
                    self.executor.open()
        by_unit = {touch.ref: (touch,) for moment in trace.moments for touch in moment.touches}  # says on which tier
        norm: GlobalNorm | None = None
        with self.executor.apart(), noticed_at("the norm of the gradients, which the step waits for"):
            for name in counted:
                if name in own:
                    norm = norm or self._begin_norm(chunked)
                    norm.add(self.binding.by_name[name].flat(own[name]))
                    norm.end_tensor()
                elif name in self.in_chunks.names:
                    for part, touches in gradient_parts(self.layout, name, writes=False):
                        here = by_unit.get(touches[0].ref, touches)
                        (unit,) = self.executor.use(Phase.STEP, name, here)
                        norm = norm or self._begin_norm(chunked)  # not before there is room for its scratch
                        norm.add(unit[part.start : part.stop], self.in_chunks.factors.get(name, ()))
                    if norm is not None:
                        norm.end_tensor()
            numbers = read(flags, (norm or self._begin_norm(chunked)).numbers())
            found = norm_of(numbers) if self.mesh is None else self.mesh.norm(numbers)
        if not stay:
            self.stretches.end()
        return found

    def _begin_norm(self, chunked: Sequence[str]) -> GlobalNorm:
        device = self.binding.device
        if self.gathering is not None:
            return self.gathering.norm(chunked)
        if device is None:
            return self.updates.passes["cpu"].norm(None)
        return self.updates.passes[device.type].norm(device, largest=self.layout.largest_numel)

    def multiply(self, factor: Tensor) -> None:
        """Multiplies every gradient there is with a factor (0-dim fp32)."""
        self._narrow.put_in_chunks()
        self.in_chunks.multiply(factor)
        with self.executor.quiet():
            for _, own in self.binding.gradients.owned():
                own.mul_(factor)

    def overflowed(self) -> list[OverflowFlag]:
        """Flags of gradients that have, or may have, an Inf or NaN, in the order of arrival. A device has perhaps not answered yet."""
        self._expect_gradients()
        self._narrow.put_in_chunks()
        own = [OverflowFlag.of(name, torch.isfinite(own).all()) for name, own in self.binding.gradients.owned()]
        flags = [*self.in_chunks.overflow.flags(), *own]
        shared = self.mesh or self.gathering
        if shared is None:
            return flags
        of_all = shared.collectives.agree(names_of(flags), "overflowed gradients")
        # Those of the first rank first: alike on all.
        return [OverflowFlag(name, None, is_finite=False) for name in dict.fromkeys(chain.from_iterable(of_all))]

    def first_of(self, overflowed: Sequence[OverflowFlag], *, before_step: bool) -> str | None:
        """The parameter whose gradient was the first to arrive with an Inf or NaN, by name; None where all are finite.

        `before_step`: whether `step` comes next, for the same gradients. Where it clips, and a device has not answered yet, the norm is taken for
        it now, and read with the answer; `forget_norm` ends that.
        """
        clips = before_step and self.max_grad_norm is not None and not self.binding.gradients.stay
        if clips and any(flag.on_device is not None for flag in overflowed):
            self._norm = self._take_norm(overflowed)
        with noticed_at("the look for overflowed gradients, which the step waits for"):
            names = names_of(overflowed)
        return names[0] if names else None

    def forget_norm(self) -> None:
        """Forgets the norm that was taken for the next step: gradients may change from now on."""
        self._norm = None

    def step(self) -> None:
        """Notes the update of every parameter that has a gradient and is in a group."""
        self.expect_whole()
        self._expect_gradients()
        if self.gathering is not None:
            self.gathering.order.forget()
        if self.max_grad_norm is not None:
            self.clip(self.max_grad_norm)
        hypers = self.hypers()
        if self.gathering is not None:
            self.gathering.stepped(hypers)
        if not self.whole.why:
            self._step_whole(hypers)
            return
        own = sorted(name for name, _ in self.binding.gradients.owned() if name in hypers)
        names = [name for name in self.binding.by_name if name in hypers and name in self.in_chunks.names]
        self.in_chunks.late_planes.thaw(*names, *own)
        began = time.perf_counter()
        if own:  # which may be changed at any time
            self.stretches.end()
            self.updates.update_at_once(own, hypers)
        # From this call on the values count as changed, whenever the work is done: autograd must not take what it saved for current.
        self.binding.changes.outdate(names)
        self.stretches.step_ended()
        order = self.updates.order(names, hypers)
        order.seconds = time.perf_counter() - began
        self.executor.pending = order
        if self.stretches.blocks.bound and any(ref.plane == WEIGHT for ref in self.executor.store.leases.held()):
            self.executor.settle()  # nobody is asked before a view that a block has given away, and that outlives it, is read

    def _step_whole(self, hypers: Mapping[str, Hyper]) -> None:
        began = time.perf_counter()
        by_name = self.binding.by_name
        names = [name for name, bound in by_name.items() if name in hypers and bound.tensor().grad is not None]
        self.updates.update_at_once(names, hypers)
        self.updates.seconds = time.perf_counter() - began
        stretch = self.executor.pilot.stretch
        stretch.gives_gradients()  # of which most have not been told of
        stretch.finish()
        self.stretches.step_ended()
