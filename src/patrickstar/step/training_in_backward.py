"""Training with `step="in_backward"`: a parameter is updated as soon as its gradient has arrived, and the gradient is gone."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from patrickstar.core.layout import Part
from patrickstar.core.planes import GRAD, PlaneRef
from patrickstar.core.trace import Phase, Touch, Trace
from patrickstar.errors import StateError, some
from patrickstar.optim.hyper import Hyper
from patrickstar.parameters.bound import BoundParameter
from patrickstar.parameters.changes import EscapedMemory
from patrickstar.plan.stretch import Stretch
from patrickstar.step.pending_step import PendingStep
from patrickstar.step.training import Training

_SECOND_BACKWARD = (
    'a second backward before optimizer.step() with step="in_backward": parameters have been updated from the first. '
    'Call optimizer.step() after each backward, or manage with step="deferred" to accumulate'
)
_NOT_ZEROED = (
    'with step="in_backward" gradients are used as they arrive, and gone: the next ones cannot be added to them, nor be used again. Call '
    'optimizer.zero_grad() after each optimizer.step(), or manage with step="deferred"'
)


@dataclass(kw_only=True, eq=False)
class InBackwardTraining(Training):
    """Training with gradients that are used as they arrive; those that cannot be are used when the backward ends.

    Where the plan has a chunk updated whole, gradients are gathered in it, and the last one of it begins its update. See Note [Pending step].

    `handed_out`: memory of weights that somebody may write to unseen.
    """

    in_backward = True

    handed_out: EscapedMemory

    _backward_hypers: Mapping[str, Hyper] = field(default_factory=dict)
    _updated: set[str] = field(default_factory=set)
    _spent: set[str] = field(default_factory=set)  # by steps before, and not zeroed since
    _postponed: set[str] = field(default_factory=set)
    _added: set[str] = field(default_factory=set)  # to gradients of the user's own, which the step uses
    _unfinished: bool = False
    _stretch: Stretch | None = None  # whose chunks are gathered

    def __post_init__(self) -> None:
        self._order = PendingStep(self.updates, {}, Trace(()))  # which takes no gradient
        self.binding.gradients.comes = partial(InBackwardTraining._arrives, weakref.proxy(self))

    def gradient(self, name: str, gradient: Tensor) -> None:
        """Takes a gradient that has arrived: updates its parameter with it, or keeps it until the backward ends."""
        if not self.whole.why:
            if name in self._backward_hypers and name not in self._added:
                if name not in self._postponed and self.whole.may_update(name):
                    self._update({name}, self._backward_hypers)
                    self.binding.whole.withhold(name)
                else:
                    self._postponed.add(name)
            return
        bound = self.binding.records[name]
        self._arrives(name)
        owner = bound.owner
        hyper = self._backward_hypers.get(owner)
        # Where the user's loop has left a gradient before (from before manage(), say), it is part of the sum.
        alone = owner not in self.in_chunks.names
        if hyper is not None and alone and self.touches.updates_at_once(name):
            if name in self._updated:
                raise StateError(_SECOND_BACKWARD)
            self.updates.steps[owner] = self.updates.steps.get(owner, 0) + (owner not in self._updated)  # once for all
            self._updated |= {name, owner}
            self.updates.update_now(bound, gradient, hyper=hyper, gather=self._gather)
        else:
            if any(map(self._order.takes, self.layout.parts(name))):
                self._end_gathering(f"the gradient of {name} has to wait until the backward ends")
            self._keep(bound, gradient)
            if hyper is not None:
                self._postponed.add(owner)

    def _arrives(self, name: str) -> None:
        """Notes that a backward has a gradient to give; where parameters keep their bytes, before it is added to `p.grad`."""
        if self._bringing is None:
            if self._updated and not self._is_nested:
                raise StateError(_SECOND_BACKWARD)
            if not self.whole.why:
                self._spent = set(self.binding.gradients.used.there(self._spent))
            if self._spent:
                raise StateError(f"a backward after a step whose gradients were not zeroed: {_NOT_ZEROED}")
            self._backward_hypers = dict(self.hypers())
            self._begin_gathering()
            self._unfinished = True
        self.notice_backward()
        if not self.whole.why:
            if name in self._updated:
                raise StateError(_SECOND_BACKWARD)
            if name not in self._postponed and self.binding.gradients.own_of(name) is not None:
                self._added.add(name)

    def _backward_ends(self, inside: bool) -> None:
        super()._backward_ends(inside)
        if not inside:
            self.binding.whole.give_back()
            self._end_gathering()
        self._unfinished = False
        if not inside:
            self._update_postponed()

    def _update_postponed(self) -> None:
        names, self._postponed = self._postponed, set()
        if not self.whole.why:  # and somebody may have set `p.grad` to None
            names = {name for name in names if self.binding.gradients.own_of(name) is not None}
        self._update(names, self._backward_hypers)

    def _update_rest(self) -> None:
        """Updates parameters whose gradient no backward has used: one from before `manage`, or assigned as `p.grad`."""
        hypers = self.hypers()
        own = {name for name, _ in self.binding.gradients.owned()}
        if again := sorted(own & self._updated):
            raise StateError(f".grad of {some(again, most=8)} was assigned a tensor after the backward: {_NOT_ZEROED}")
        left = {name for name in (self.in_chunks.names | own) - self._updated if name in hypers}
        if self.whole.why:
            self._update(left, hypers)
        else:  # from gradients that stay
            self.updates.update_at_once(sorted(left), hypers)

    def _update(self, names: Collection[str], hypers: Mapping[str, Hyper]) -> None:
        """Updates parameters now, from gradients that are kept, which are let go then, or from the user's own."""
        if not names:
            return
        if not self.whole.why:
            self.updates.update_at_once(sorted(names), hypers, as_made=True)
            self._updated.update(names)
            self.binding.gradients.used.put(names)
            return
        self._updated.update(names)
        self._unfinished = True
        kept = self.in_chunks.names.intersection(names)
        self.updates.update_at_once(sorted(name for name, _ in self.binding.gradients.owned() if name in names), hypers)
        self.executor.pending = self.updates.order(kept, hypers)
        self.executor.settle()
        self._unfinished = False
        self.in_chunks.drop(kept)

    def _begin_gathering(self) -> None:
        """Makes ready for the gradients of a backward, or of one inside of it."""
        stretch = self.executor.pilot.stretch
        if stretch is self._stretch:
            return
        self._stretch, whole = stretch, stretch.followed.whole_chunks if stretch.followed is not None else None
        if whole is None:
            self._order = PendingStep(self.updates, {}, Trace(()))
            return
        updates = Trace(tuple(moment for moment in whole.trace.moments if moment.updates is not None))
        frees, arrivals = set(whole.slots), dict(whole.arrivals)
        self._order = PendingStep(self.updates, {}, updates, frees=frees, arrivals=arrivals, is_woven=True)
        self.executor.pending = self._order

    def _gather(self, bound: BoundParameter, part: Part, gradient: Tensor, hyper: Hyper) -> bool:
        """Puts a gradient into its chunk, and begins the chunk's update where it was the last one. False: the chunk is not updated whole."""
        order = self._order
        if not order.takes(part):
            return False
        if self.handed_out.watched or self.binding.changes.is_shown(bound.name):
            # Somebody would see values of before the update until that is over.
            self._end_gathering(f"{bound.name} is still in use in the backward")
            return False
        touches = (Touch(PlaneRef(part.chunk, GRAD), True),)
        (unit,) = self.executor.use(Phase.BACKWARD, bound.name, touches)
        unit[part.start : part.stop].copy_(gradient)
        order.alike[bound.owner] = self.updates.steps[bound.owner], hyper, ()
        update = order.take(part)
        if update is not None:
            # Again, where the plan was left with this arrival: what had come before is updated.
            self.executor.pending = order
            held = self.executor.store.leases.held()
            if any(touch.ref in held for touch in update.touches):
                self._end_gathering(f"somebody holds the chunk of {bound.name} in the backward")
            else:
                self.executor.update(update)
        return True

    def _end_gathering(self, why: str = "") -> None:
        """Has what has come updated, and gathers no more in this backward. `why`: what the plan did not have."""
        if self.executor.pending is self._order:
            if why:
                self.executor.pilot.stretch.depart(why)
            self._order.close()
            self.executor.settle()

    def is_spent(self, name: str) -> bool:
        return name in self._spent or (name in self._updated and not self.has_gradient(name))

    def drop_gradient(self, name: str) -> None:
        self._spent.discard(name)
        super().drop_gradient(name)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Raises StateError: there are none to give."""
        raise StateError(
            'gradients() with step="in_backward": gradients are used as they arrive; manage with step="deferred"'
        )

    def zero_grad(self, *, set_to_none: bool, names: Iterable[str] | None = None) -> None:
        """Forgets the gradients of parameters, used ones too, or makes them zero. `names`: which parameters; None: all."""
        names = None if names is None else set(names)
        self.binding.gradients.used.forget(names)
        self._spent -= self._spent if names is None else names
        super().zero_grad(set_to_none=set_to_none, names=names)

    def clip(self, max_norm: float) -> Tensor:  # noqa: ARG002
        """Raises StateError: it is too late."""
        raise StateError(
            'clipping with step="in_backward": the norm is known when parameters are updated; manage with step="deferred"'
        )

    def step(self) -> None:
        """Updates what no backward has updated, and ends the step."""
        self.expect_whole()
        if self._spent:
            raise StateError(f"step() again without a backward, or a zero_grad(), since the last one: {_NOT_ZEROED}")
        self._end_gathering()
        self._update_postponed()
        self._update_rest()
        own = {name for name, _ in self.binding.gradients.owned()}  # which autograd adds to, as ever
        self._spent = (self._updated & self.binding.by_name.keys()) - own
        self._updated.clear()
        self._added.clear()
        self._bringing, self._is_nested = None, False
        self.stretches.step_ended()

    def _forget_backward(self) -> None:
        self.binding.whole.give_back()
        super()._forget_backward()
        if not self.whole.why:
            self._spent = set(self.binding.gradients.used.there(self._spent))

    def _half_done(self) -> str:
        if not self._unfinished and not self.updates.is_half_done:
            return ""
        names = sorted(self._updated & self.binding.by_name.keys())
        shown = some(names, most=8)
        return f'an exception ended a backward with step="in_backward" after {len(names)} parameters had been updated ({shown})'

    def forget_unfinished(self) -> None:
        super().forget_unfinished()
        self._unfinished = False
        self._order.arrivals.clear()
        for gradient in sorted(self._order.frees & self.executor.store.state.home.keys()):
            self.executor.release(gradient)
        for names in (self._updated, self._spent, self._postponed, self._added):
            names.clear()
