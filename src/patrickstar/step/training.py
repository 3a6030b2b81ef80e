"""Training: from gradients to updated parameters, by accumulation, clipping, the deferred step or the step in backward.

See Note [Pending step] in `pending_step.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from patrickstar.core.formats import SessionFormats
from patrickstar.core.layout import Layout
from patrickstar.core.machine import Tier
from patrickstar.core.planes import GradientUse
from patrickstar.core.trace import Trace
from patrickstar.errors import StateError, some
from patrickstar.memory.device_failure import noticed_at
from patrickstar.memory.lanes import Task
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.norm import clip_factor
from patrickstar.optim.scratch import NONE, PassBytes
from patrickstar.parameters.backward_sums import BackwardSums
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import BoundParameter
from patrickstar.plan.touches import Touches
from patrickstar.step.backwards import Backwards
from patrickstar.step.executor import Executor
from patrickstar.step.gradients import Gradients, InPlane
from patrickstar.step.late_planes import LatePlanes
from patrickstar.step.overflow import OverflowFlag, names_of
from patrickstar.step.pending_step import PendingStep
from patrickstar.step.step_traces import StepTraces
from patrickstar.step.stretches import Stretches
from patrickstar.step.update import Updates
from patrickstar.step.whole_updates import WholeUpdates
from patrickstar.torch_private import Plain, backward_id

__all__ = ["Training"]

_SECOND_BACKWARD = (
    'a second backward before optimizer.step() with step="in_backward": parameters have been updated from the first. '
    'Call optimizer.step() after each backward, or manage with step="deferred" to accumulate'
)
_NOT_ZEROED = (
    'with step="in_backward" gradients are used as they arrive, and gone: the next ones cannot be added to them, nor be used again. Call '
    'optimizer.zero_grad() after each optimizer.step(), or manage with step="deferred"'
)
_log = logging.getLogger("patrickstar")


class Training:
    """The meaning of gradients and of the optimizer's calls under management.

    Args:
        hypers: the hyper-parameters of every parameter in a group, by name, as the groups stand now.
        max_grad_norm: clipping at every step, or None. formats: which chunks have a split master.
        is_watched: tells whether somebody may write to weights unseen. pass_bytes: what passes take of the tier that computes.

    Attributes:
        backwards: the backward calls under way.
        steps: updates so far, by parameter name; a parameter that was never updated has no entry. step_seconds: duration of the last update.
    """

    def __init__(
        self,
        *,
        binding: Binding,
        layout: Layout,
        executor: Executor,
        stretches: Stretches,
        gradients: Gradients,
        updates: Updates,
        touches: Touches,
        late_planes: LatePlanes,
        hypers: Callable[[], Mapping[str, Hyper]],
        max_grad_norm: float | None,
        formats: SessionFormats,
        is_watched: Callable[[], bool],
        pass_bytes: PassBytes = NONE,
    ) -> None:
        self._binding = binding
        self._layout = layout
        self._executor = executor
        self._stretches = stretches
        self._gradients = gradients
        self._updates = updates
        self._touches = touches
        self._late_planes = late_planes
        self._hypers = hypers
        self._max_grad_norm = max_grad_norm
        self._norm: Tensor | None = None  # of the gradients as they are, taken before `step`

        executor.carry_out_step = self._carry_out
        executor.step_is_over = self._step_is_over
        executor.store.update_work = self._work
        self.steps: dict[str, int] = {}
        self.step_seconds = 0.0
        in_chunks = not binding.gradients.stay
        self._traces = StepTraces(layout, formats, in_chunks=in_chunks, passes=pass_bytes)
        self._whole_updates = WholeUpdates(executor, binding, is_watched=is_watched)
        self._backward_hypers: Mapping[str, Hyper] = {}
        self._updated: set[str] = set()
        self._spent: set[str] = set()  # by steps before, and not zeroed since
        self._postponed: set[str] = set()
        self._sums = BackwardSums()
        self.backwards = Backwards(self._backward_ends)
        self._unfinished = False

    @property
    def in_backward(self) -> bool:
        """True where parameters are updated as gradients arrive."""
        return self._touches.gradients is GradientUse.UPDATE

    # gradients arriving

    def gradient(self, name: str, gradient: Tensor) -> None:
        """Takes a gradient that has arrived: updates its parameter with it, or keeps it."""
        bound = self._binding.records[name]
        self._arrives()
        if self._touches.gradients is GradientUse.TENSOR:
            return
        if not self.in_backward:
            self._keep(bound, gradient)
            return
        owner = bound.owner
        hyper = self._backward_hypers.get(owner)
        # Where the user's loop has left a gradient before (from before manage(), say), it is part of the sum.
        alone = owner not in self._gradients.names
        if hyper is not None and alone and self._touches.updates_at_once(name):
            if name in self._updated:
                raise StateError(_SECOND_BACKWARD)
            self.steps[owner] = self.steps.get(owner, 0) + (owner not in self._updated)  # once for all tiles
            self._updated |= {name, owner}
            self._updates.update_now(
                bound, gradient, hyper=hyper, step=self.steps[owner], gather=self._whole_updates.gather
            )
        else:
            self._whole_updates.keep(name, self._layout.parts(name))
            self._keep(bound, gradient)
            if hyper is not None:
                self._postponed.add(owner)

    def _keep(self, bound: BoundParameter, gradient: Tensor) -> None:
        """Keeps what has come of a gradient, in its plane; until the backward ends in a sum of its own where the plane is of another type."""
        if self._touches.adds_up(bound.name, str(gradient.dtype).removeprefix("torch.")):
            with self._executor.quiet():
                self._sums.add(bound.name, gradient)
        else:
            self._gradients.add(bound, gradient)

    def _arrives(self) -> None:
        """Notes that a backward has a gradient to give."""
        stretch = self._executor.pilot.stretch
        if not stretch.gave_gradients:
            stretch.gives_gradients()
        if not self.backwards.bring and self.in_backward:
            if self._updated and not self.backwards.nested:
                raise StateError(_SECOND_BACKWARD)
            if self._spent:
                raise StateError(f"a backward after a step whose gradients were not zeroed: {_NOT_ZEROED}")
            self._backward_hypers = dict(self._hypers())
            self._whole_updates.begin()
            self._unfinished = True
        self.backwards.notice_gradient()

    def _backward_ends(self, inside: bool) -> None:
        if inside:  # of another, which goes on
            self._unfinished = False
            return
        for name, gradient in self._sums.take().items():
            self._gradients.add(self._binding.records[name], gradient)
        assert not self._gradients.incomplete, "some tiles of a parameter have been used without the others"
        self._gradients.whole |= self._gradients.names
        self._stretches.backward_ended()
        if self.in_backward:
            self._whole_updates.end()
            self._unfinished = False
            self._update_postponed()

    def _update_postponed(self) -> None:
        names, self._postponed = self._postponed, set()
        self._update(names, self._backward_hypers)

    def _update_rest(self) -> None:
        """Updates parameters whose gradient no backward has used: one from before `manage`, or assigned as `p.grad`."""
        hypers = self._hypers()
        left = self._gradients.names | {name for name, _ in self._binding.gradients.owned()}
        self._update({name for name in left - self._updated if name in hypers}, hypers)

    def _update(self, names: Collection[str], hypers: Mapping[str, Hyper]) -> None:
        """Updates parameters now, from gradients that are kept, which are let go then, or from the user's own."""
        if not names:
            return
        for name in names:
            self.steps[name] = self.steps.get(name, 0) + 1
        self._updated.update(names)
        self._unfinished = True
        self._do_now(self._order(names, hypers))
        self._unfinished = False
        for name in names:
            self._gradients.drop(name)

    def begin_forward(self) -> None:
        """Makes ready for a forward. StateError where parameters are of no one step."""
        self.expect_whole()
        self._gradients.drop_incomplete()

    def expect_whole(self) -> None:
        """Raises StateError where an exception has left an update of the parameters half done."""
        if self._executor.pending is not None and self._executor.pending.failed is not None:
            self._executor.settle()
        if not self._unfinished or backward_id() != -1:
            return
        if not self.in_backward:
            raise StateError(
                "an exception ended an optimizer step after part of the parameters had been updated: the weights are of no one step. "
                "Call session.load_checkpoint(dir)"
            )
        names = sorted(self._updated & self._binding.by_name.keys())
        shown = some(names, most=8)
        raise StateError(
            f'an exception ended a backward with step="in_backward" after {len(names)} parameters had been updated ({shown}): '
            "the weights are of no one step. Call session.load_checkpoint(dir)"
        )

    def forget_unfinished(self) -> None:
        """Forgets an update that was left half done: everything has been loaded anew."""
        self._unfinished = False
        self.backwards.forget()
        self._whole_updates.forget()
        self._updated.clear()
        self._spent.clear()
        self._postponed.clear()
        self._sums.take()

    # gradients read and let go

    def has_gradient(self, name: str) -> bool:
        """Tells whether a parameter has a gradient in the plane."""
        return name in self._gradients.names

    def is_spent(self, name: str) -> bool:
        """Tells whether the gradient of a parameter has been used as it came, and nobody has zeroed it since."""
        return name in self._spent or (self.in_backward and name in self._updated and not self.has_gradient(name))

    def drop_gradient(self, name: str) -> None:
        """Drops a gradient in the plane: the user has set `p.grad` to None, or to a tensor."""
        self._spent.discard(name)
        self._gradients.drop(name)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, gradient in fp32) of every parameter that has one, in registration order, one at a time."""
        if self.in_backward:
            raise StateError(
                'gradients() with step="in_backward": gradients are used as they arrive; manage with step="deferred"'
            )
        self._executor.settle()
        for name, bound in self._binding.by_name.items():
            own = self._binding.gradients.own_of(name)
            if own is not None:
                yield name, own.to(torch.float32)
            elif name in self._gradients.names:
                yield name, self._gradients.read(bound)

    def zero_grad(self, *, set_to_none: bool, names: Iterable[str] | None = None) -> None:
        """Forgets the gradients of parameters, or makes them zero. `names`: which parameters; None: all."""
        wanted = set(self._binding.by_name if names is None else names)
        self._spent -= wanted
        self._sums.drop(label for name in wanted for label in (name, *self._layout.leaves(name)))
        if set_to_none and self._gradients.names | self._gradients.incomplete.keys() <= wanted:
            self._gradients.drop_all()
            if self._binding.gradients.own <= wanted:
                self._binding.gradients.forget_own()
                return
        if not set_to_none:
            self._executor.settle()
        with Plain():
            for name in sorted(self._binding.gradients.own & wanted):
                parameter = self._binding.by_name[name].parameter
                if set_to_none:
                    parameter.grad = None
                    self._binding.gradients.is_not_own(name)
                elif parameter.grad is not None:
                    parameter.grad = parameter.grad.detach_() if parameter.grad.grad_fn is not None else parameter.grad
                    parameter.grad.requires_grad_(False).zero_()
        if set_to_none:
            for name in sorted((self._gradients.names | self._gradients.incomplete.keys()) & wanted):
                self._gradients.drop(name)
        else:
            self._gradients.fill_with_zeros(wanted)

    # clipping and stepping

    def clip(self, max_norm: float) -> Tensor:
        """The global norm of all gradients, which count from now on as multiplied with the factor that clips this norm."""
        if self.in_backward:
            raise StateError(
                'clipping with step="in_backward": the norm is known when parameters are updated; manage with step="deferred"'
            )
        self._executor.settle()
        norm, self._norm = self._norm, None
        if norm is None:
            norm = self._take_norm(self._gradients.overflow.flags())
        self.multiply(clip_factor(max_norm, norm))
        return norm

    def _take_norm(self, flags: Sequence[OverflowFlag]) -> Tensor:
        """The global norm of all gradients. `flags`: are read with it."""
        norm: Tensor
        if self._binding.gradients.stay:
            norm = self._updates.norm_of(self._tensors(), flags)
        else:
            with InPlane(self._binding, self._gradients, self._binding.by_name):
                names = self._gradients.names
                trace = self._stretches.begin_norm(self._traces.norm(names))
                with noticed_at("the norm of the gradients, which the step waits for"):
                    norm = self._updates.norm(names, self._gradients.factors, trace, flags)
                self._stretches.end()
        return norm

    def multiply(self, factor: Tensor) -> None:
        """Multiplies every gradient there is with a factor (0-dim fp32)."""
        self._gradients.multiply(factor)
        with self._executor.quiet():
            for _, own in self._binding.gradients.owned():
                own.mul_(factor)

    def step(self) -> None:
        """Notes the update of every parameter that has a gradient and is in a group. See Note [Pending step]."""
        self.expect_whole()
        if self.in_backward:
            if self._spent:
                raise StateError(
                    f"step() again without a backward, or a zero_grad(), since the last one: {_NOT_ZEROED}"
                )
            self._whole_updates.end()
            self._update_postponed()
            self._update_rest()
            own = {name for name, _ in self._binding.gradients.owned()}  # which autograd adds to, as ever
            self._spent = (self._updated & self._binding.by_name.keys()) - own
            self._updated.clear()
            self.backwards.forget()
            self._stretches.step_ended()
            return
        self._executor.settle()
        if self._max_grad_norm is not None:
            self.clip(self._max_grad_norm)
        hypers = self._hypers()
        own = {name for name, _ in self._binding.gradients.owned()}
        names = [
            name for name in self._binding.by_name if name in hypers and (name in self._gradients.names or name in own)
        ]
        for name in names:
            self._late_planes.thaw(name)
            self.steps[name] = self.steps.get(name, 0) + 1
        # From this call on the values count as changed, whenever the work is done: autograd must not take what it saved for current.
        self._binding.changes.outdate(names)
        self._stretches.step_ended()
        order = self._order(names, hypers)
        if own:
            self._do_now(order)
        else:
            self._executor.pending = order

    def _order(self, names: Collection[str], hypers: Mapping[str, Hyper]) -> PendingStep:
        """A step of these parameters, as things stand now."""
        return PendingStep(
            {name: hypers[name] for name in names},
            {name: self.steps[name] for name in names},
            self._trace_of(names),
            {name: self._gradients.factors[name] for name in names if name in self._gradients.factors},
            self._tensors() if self._binding.gradients.stay else None,
        )

    def _trace_of(self, names: Collection[str]) -> Trace:
        trace = self._traces.step(names)
        tiers = self._stretches.tiers_of(trace)
        return self._traces.step(names, tiers) if tiers else trace

    def _do_now(self, order: PendingStep) -> None:
        """Carries out an order at once: gradients of the user's own may be changed at any time."""
        with ExitStack() as stack:
            if order.gradients is None:
                stack.enter_context(InPlane(self._binding, self._gradients, order.hypers))
            self._executor.pending = order
            self._executor.settle()

    def overflowed(self) -> list[OverflowFlag]:
        """Flags of gradients that have, or may have, an Inf or NaN, in the order of arrival. A device has perhaps not answered yet."""
        self._executor.settle()
        own = [OverflowFlag.of(name, torch.isfinite(own).all()) for name, own in self._binding.gradients.owned()]
        return [*self._gradients.overflow.flags(), *own]

    def first_of(self, overflowed: Sequence[OverflowFlag], *, before_step: bool) -> str | None:
        """The parameter whose gradient was the first to arrive with an Inf or NaN, by name; None where all are finite.

        `before_step`: whether `step` comes next, for the same gradients. Where it clips, and a device has not answered yet, the norm is taken for
        it now, and read with the answer; `forget_norm` ends that.
        """
        clips = before_step and self._max_grad_norm is not None and not self._binding.gradients.stay
        if clips and any(flag.on_device is not None for flag in overflowed):
            self._norm = self._take_norm(overflowed)
        with noticed_at("the look for overflowed gradients, which the step waits for"):
            names = names_of(overflowed)
        return names[0] if names else None

    def forget_norm(self) -> None:
        """Forgets the norm that was taken for the next step: gradients may change from now on."""
        self._norm = None

    def _work(self, chunk: int, tier: Tier) -> Task:
        assert self._executor.pending is not None, "no update is pending"
        return self._updates.work(self._executor.pending, chunk, tier)

    def _carry_out(self, order: PendingStep) -> None:
        """Carries out what is left of an order, in a stretch of its own."""
        self._stretches.begin_update(order)
        for moment in tuple(order.waiting.values()):
            self._executor.update(moment)
        if self._stretches.end_update():
            for gradient in sorted(filter(self._executor.store.state.is_free, order.frees)):
                self._executor.release(gradient)

    def _step_is_over(self, order: PendingStep) -> None:
        self._unfinished |= order.failed is not None
        self.step_seconds = order.seconds
        self._updates.over(order)

    def _tensors(self) -> dict[str, Tensor]:
        """The gradients that are the user's own: by name, 1-D in slot order."""
        found = {}
        with self._executor.apart():
            for name, bound in self._binding.by_name.items():
                own = self._binding.gradients.own_of(name)
                if own is not None:
                    found[name] = bound.flat(own)
        return found

    def finish(self) -> None:
        """Does what is pending, since the session ends. An update that was left half done is told of in a warning."""
        try:
            self.expect_whole()
        except StateError as problem:
            _log.warning("%s", problem)
            self._executor.pending = None
        else:
            self._executor.settle()
