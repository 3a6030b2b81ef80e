"""Training: from gradients to updated parameters, in one of two modes.

`training_deferred.py` keeps gradients until `step()`; `training_in_backward.py` uses them as they arrive. Updates are done by `optimizer_step.py`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from patrickstar.core.layout import Layout
from patrickstar.errors import StateError
from patrickstar.optim.hyper import Hyper
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import BoundParameter
from patrickstar.parameters.exchange import BackwardSums
from patrickstar.plan.touches import Touches
from patrickstar.step.executor import Executor
from patrickstar.step.gathering import Gathering
from patrickstar.step.gradients import Gradients
from patrickstar.step.optimizer_step import OptimizerStep
from patrickstar.step.room import HostRoom
from patrickstar.step.stretches import Stretches
from patrickstar.step.whole import Whole
from patrickstar.torch_private import Plain, at_end_of_backward, backward_id, inside_backward_node

_log = logging.getLogger("patrickstar")


@dataclass(kw_only=True, eq=False)
class Training(ABC):
    """The meaning of gradients and of the optimizer's calls under management: what both modes have in common.

    Attributes:
        in_chunks: the gradients in the plane. updates: the optimizer's step, which does updates.
        hypers: the hyper-parameters of every parameter in a group, by name, as the groups stand now.
        whole: updates parameters as long as they keep their bytes. in_backward: whether parameters are updated as gradients arrive.
        sums: of this backward, where gradients come in parts of another type, or for all ranks.
    """

    in_backward: ClassVar[bool]

    binding: Binding
    layout: Layout
    executor: Executor
    stretches: Stretches
    in_chunks: Gradients
    updates: OptimizerStep
    touches: Touches
    hypers: Callable[[], Mapping[str, Hyper]]
    whole: Whole
    sums: BackwardSums
    gathering: Gathering | None = None
    backwards: int = 0
    """How many have ended that have brought gradients."""
    completing: Callable[[], None] = lambda: None
    """Is called before gradients are used: those of a step in parts are still to be completed."""
    lr_factor: float = 1.0
    """Of the learning rates of all groups, where a step has another batch than they are meant for."""

    _bringing: int | None = None  # the backward under way that has brought gradients; None: there is none
    _around: int | None = None  # the backward in which a block was last computed again
    _is_nested: bool = False  # whether a backward inside of another has ended, and the other has not

    @abstractmethod
    def gradient(self, name: str, gradient: Tensor) -> None:
        """Takes a gradient that has arrived."""

    def _keep(self, bound: BoundParameter, gradient: Tensor) -> None:
        """Keeps what has come of a gradient, in its plane; until the backward ends in a sum of its own where the plane is of another type."""
        if self.gathering is not None or self.touches.adds_up(bound.name, str(gradient.dtype).removeprefix("torch.")):
            if isinstance(self.executor.room, HostRoom):
                self.executor.room.look_again()  # no moment comes before the gradient of a table does
            with self.executor.quiet():
                self.sums.add(bound.name, gradient)
        else:
            self.in_chunks.add(bound, gradient, in_block=not self.in_backward and bool(self.binding.access.open))

    # backward calls: torch tells of the end of the innermost one alone, and only whoever asks inside of that

    def notice_backward(self) -> None:
        """Notes that the innermost backward has a gradient to give, now or at its end."""
        if self._bringing != backward_id():
            self._bringing = backward_id()
            self.executor.pilot.stretch.gives_gradients()
            at_end_of_backward(self._end)

    def notice_recomputation(self) -> None:
        """Notes that a block is computed again: all gradients may come from backwards inside of this one, whose end is still the end of all."""
        if self._around != backward_id():
            self._around = backward_id()
            at_end_of_backward(self._end_around)

    def _end_around(self) -> None:
        if self._is_nested and not inside_backward_node():
            self._end()

    def _end(self) -> None:
        self._is_nested = inside_backward_node()
        try:
            self._backward_ends(self._is_nested)  # which may bring gradients that have waited for this
        finally:
            self._bringing = None

    def _backward_ends(self, inside: bool) -> None:
        """Takes the end of a backward that has brought gradients, itself or in one inside of it. `inside`: of another, which goes on."""
        if inside:
            return
        self.backwards += 1
        if self.gathering is not None:
            self.gathering.end_backward()
        for name, gradient in self.sums.take().items() if self.sums else ():
            self.in_chunks.add(self.binding.records[name], gradient)
        assert not self.in_chunks.incomplete, "some tiles of a parameter have been used without the others"
        self.in_chunks.whole |= self.in_chunks.names
        self.stretches.backward_ended()

    def has_gradient(self, name: str) -> bool:
        return name in self.in_chunks.names

    def is_spent(self, name: str) -> bool:  # noqa: ARG002
        return False

    def drop_gradient(self, name: str) -> None:
        """Drops a gradient in the plane: the user has set `p.grad` to None, or to a tensor."""
        self.in_chunks.drop([name])

    @abstractmethod
    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, gradient in fp32) of every parameter that has one, in registration order, one at a time."""

    def zero_grad(self, *, set_to_none: bool, names: Iterable[str] | None = None) -> None:
        """Forgets the gradients of parameters, or makes them zero. `names`: which parameters; None: all."""
        wanted = set(self.binding.by_name if names is None else names)
        if self.sums:
            self.sums.drop(label for name in wanted for label in (name, *self.layout.leaves(name)))
        if self.gathering is not None:
            self.gathering.kept.drop(wanted)
        if set_to_none:
            self.in_chunks.drop(wanted)
            self.binding.gradients.forget_own(wanted)
            return
        self.executor.settle()
        with Plain():
            for name in sorted(self.binding.gradients.own & wanted):
                if (own := self.binding.gradients.own_of(name)) is not None:
                    if own.grad_fn is not None:
                        own.detach_()
                    own.requires_grad_(False).zero_()
        self.in_chunks.fill_with_zeros(wanted)

    @abstractmethod
    def clip(self, max_norm: float) -> Tensor:
        """The global norm of all gradients, which count from now on as multiplied with the factor that clips this norm."""

    @abstractmethod
    def step(self) -> None:
        """Takes the optimizer's step: of every parameter that has a gradient and is in a group."""

    def begin_forward(self) -> None:
        """Makes ready for a forward. StateError where parameters are of no one step."""
        self.expect_whole()
        if self.in_chunks.incomplete:  # left in tiles by a backward that failed: without tiles there would be none
            self.in_chunks.drop(list(self.in_chunks.incomplete))

    def expect_whole(self) -> None:
        """Raises StateError where an exception has left an update of the parameters half done."""
        if backward_id() == -1:
            self._forget_backward()
        if self.executor.pending is not None and self.executor.pending.failed is not None:
            self.executor.settle()
        if backward_id() == -1 and (half_done := self._half_done()):
            raise StateError(f"{half_done}: the weights are of no one step. Call session.load_checkpoint(dir)")

    def _forget_backward(self) -> None:
        """Takes the last backward for over where nobody has told of its end: of one around others, or one that an exception has ended."""
        if self._is_nested and not self.whole.why:
            self._end()

    def _half_done(self) -> str:
        what = "an exception ended an optimizer step after part of the parameters had been updated"
        return what if self.updates.is_half_done else ""

    def forget_unfinished(self) -> None:
        """Forgets an update that was left half done: everything has been loaded anew."""
        self.updates.is_half_done = False
        self._bringing, self._is_nested = None, False
        self.sums.take()

    def finish(self) -> None:
        """Does what is pending, since the session ends. An update that was left half done is told of in a warning."""
        try:
            self.expect_whole()
        except StateError as problem:
            _log.warning("%s", problem)
            self.executor.pending = None
        else:
            self.executor.settle()
