"""Events of a step, on the session's side: answers the binding and the root module's hooks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Phase, Touch
from patrickstar.errors import BudgetError, StateError, some
from patrickstar.hooks import frames, is_running_in
from patrickstar.memory.leases import AssembledKey, CopyKey, WeightKey
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import Owner
from patrickstar.parameters.call_order import CallOrder
from patrickstar.parameters.changes import EscapedMemory
from patrickstar.parameters.registered import Registered
from patrickstar.parameters.transforms import expect_no_wrapper, expect_ordinary_call, is_ordinary_call
from patrickstar.plan.touches import Touches
from patrickstar.step.assembling import Assembling
from patrickstar.step.executor import Executor
from patrickstar.step.gathering import Gathering
from patrickstar.step.late_planes import LatePlanes
from patrickstar.step.optimizer_step import expect_dense
from patrickstar.step.stretches import Stretches
from patrickstar.step.training import Training
from patrickstar.step.weight_masters import Masters
from patrickstar.step.whole import Whole
from patrickstar.torch_private import backward_id, backward_makes_graph
from patrickstar.tracing.inputs import cast_inputs


@dataclass(kw_only=True, eq=False)
class Events(Owner):
    """The owner of the bytes of parameters, as far as the binding is concerned.

    Made before the binding, which needs its owner, and given afterwards what needs the binding.

    Attributes:
        registered: the model, and what it has. compute: the type that inputs are cast to.
        handed_out: memory that others may write to. outside: a parameter that no block owns, if there is one.
        advice: gives what is added where a call is refused. refused: gives what is raised where a forward does not fit.
        seconds: durations of the last forward and backward.
        is_closed: whether the session is.
    """

    registered: Registered
    named: Mapping[str, nn.Parameter]
    touches: Touches
    executor: Executor
    compute: torch.dtype = torch.float32

    binding: Binding = field(init=False)
    whole: Whole = field(init=False)
    late_planes: LatePlanes = field(init=False)
    stretches: Stretches = field(init=False)
    training: Training = field(init=False)
    handed_out: EscapedMemory = field(init=False)
    masters: Masters | Gathering = field(init=False)
    assembling: Assembling = field(init=False)
    outside: nn.Parameter | None = field(init=False)
    advice: Callable[[], str] = field(init=False)

    order: CallOrder | None = None
    refused: Callable[[BudgetError], BudgetError] = lambda refusal: refusal
    seconds: dict[str, float] = field(default_factory=lambda: {"forward": 0.0, "backward": 0.0})
    is_closed: bool = False
    _process: int = field(default_factory=os.getpid)
    _depth: int = 0
    _caller: FrameType | None = None
    _handled: BaseException | None = None
    _in_backward: bool = False
    _began_s: float = 0.0
    _backward_began_s: float = 0.0

    # the binding's owner

    def use(self, label: str, touches: Sequence[Touch]) -> None:
        if self.handed_out.watched:
            self.handed_out.check()
        if self.order is not None:
            touches = _gathered(self.order, label, touches, is_outside=not self._depth and backward_id() == -1)
        if backward_id() == -1:
            self.executor.moment(Phase.FORWARD, label, touches)
        else:
            self._in_backward = True
            self.training.notice_recomputation()
            self.executor.moment(Phase.RECOMPUTE, label, touches)

    def carry_out_pending(self) -> None:
        self.executor.update_held()

    def unpack(self, label: str, touches: Sequence[Touch]) -> None:
        self.check_watch()
        self._in_backward = True
        if backward_makes_graph():
            self.executor.pilot.stretch.differentiates()
        self.executor.moment(Phase.BACKWARD, label, touches if self.order is None else self.order.use(touches))

    def make_copy(self, key: CopyKey) -> Tensor:
        return self.assembling.make(key) if isinstance(key, AssembledKey) else self.masters.make(key)

    def renew(self, key: str | AssembledKey, copy: Tensor) -> None:
        if isinstance(key, AssembledKey):
            self.assembling.renew(key, copy)
        else:
            self.masters.renew(key, copy)

    def changed(self, key: WeightKey) -> None:
        if not isinstance(key, PlaneRef):
            self.masters.changed(key)
            return
        self.executor.wrote(key)
        phase = self.executor.change_phase()
        if phase is not Phase.STEP:
            # A moment of its own: a plan that has it keeps what was written; where the trace has none, the plan ends here.
            label = self.touches.layout.run_of(key.chunk).tensors[0]
            self.executor.moment(phase, label, (Touch(key, True),))

    def escaped(self, key: WeightKey) -> None:
        self.handed_out.add(key)

    def settle(self) -> None:
        if backward_id() == -1 and not self._depth:  # between stretches: one that is over is
            self.forget_abandoned_backward()
            self.stretches.pause()
        self.check_watch()
        self.executor.settle()

    def expect_room(self, key: AssembledKey) -> None:
        self.assembling.expect_room(key)

    def assembled_changed(self, key: AssembledKey, *, wholly: bool) -> None:
        self.assembling.changed(key, wholly=wholly)

    def updated(self) -> None:
        if self.handed_out.watched:
            self.handed_out.renew()

    def thawed(self, name: str) -> None:
        self.late_planes.thaw(name)

    def gradient(self, name: str, gradient: Tensor | None) -> None:
        if gradient is None:
            self.training.notice_backward()
            return
        if self.handed_out.watched:
            self.handed_out.check()
        if gradient.layout is not torch.strided:
            expect_dense(name, gradient)
        now = time.perf_counter()
        if not self._backward_began_s:
            self._backward_began_s = now
        self.training.gradient(name, gradient)
        self.seconds["backward"] = time.perf_counter() - self._backward_began_s

    def has_gradient(self, name: str) -> bool:
        return self.training.has_gradient(name)

    def is_spent(self, name: str) -> bool:
        return self.training.is_spent(name)

    def drop_gradient(self, name: str) -> None:
        self.training.drop_gradient(name)

    # memory that was handed out

    def check_watch(self) -> None:
        """Carries what was written unseen to where it belongs."""
        if self.handed_out.watched:
            self.handed_out.check()

    # the root module's calls

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begins a forward of the model; gives its inputs, cast.

        Raises:
            StateError: it would be compiled, traced or transformed. BudgetError: it does not fit. Nothing has changed then.
        """
        if not self.whole.why:
            if not is_ordinary_call() or is_running_in("torch.nn.utils.stateless") or os.getpid() != self._process:
                # Nobody has to see it: parameters are ordinary, or others, or a forked child's.
                return cast_inputs((args, kwargs), self.compute)
        else:
            try:
                expect_ordinary_call(module, args, kwargs, self.outside)
            except StateError as refused:
                raise StateError(f"{refused}{self.advice()}") from None
        if self.order is not None:
            expect_no_wrapper(f"{type(module).__name__} was called")
        # After an interruption torch calls no hook.
        if self._depth and not any(frame is self._caller for frame in frames()):
            _expect_alone(self)
            self._depth = 0
            self.stretches.abandon()
        if self._depth:
            self._depth += 1
            return args, kwargs
        if not self.registered.are_there() or not self.binding.are_managed():
            expect_own_parameters(self.registered.model, self.named, self.binding.is_managed, self.advice)
            self.registered = Registered(self.registered.model)  # modules without parameters have come, or gone
        self.training.begin_forward()
        self.check_watch()
        if self.binding.is_whole:
            self.binding.whole.take_back(for_forward=True)
        with self.executor.lock:
            _expect_alone(self)
            _begin_stretch(self, args, kwargs)
        self.touches.begin_forward()
        self._depth = 1
        self._caller = next(frame for frame in frames() if frame.f_globals["__name__"] == nn.Module.__module__)
        self._in_backward = False
        self._handled = sys.exc_info()[1]
        self._began_s, self._backward_began_s = time.perf_counter(), 0.0
        if self.order is not None:
            self.order.begin_forward()
        return cast_inputs((args, kwargs), self.compute)

    def after_forward(self, module: nn.Module) -> None:  # noqa: ARG002
        """Ends a forward, which is over or was left by an exception."""
        if not self._depth:
            return  # refused before it began
        self._depth -= 1
        if self._depth:
            return
        self._caller = None
        # Hooks that are always called are called while the exception is on its way.
        if sys.exc_info()[1] is not self._handled:
            self.stretches.abandon()
        self.seconds["forward"] = time.perf_counter() - self._began_s
        self._backward_began_s = time.perf_counter()
        if not torch.is_grad_enabled():
            self.stretches.end()

    def forget_abandoned_backward(self) -> None:
        """Takes a backward that has begun for over, by its end or by an exception: state is read or written by nobody inside of one."""
        if self._in_backward and backward_id() == -1:
            self._in_backward = False
            self.binding.access.close()
            self.stretches.abandon()


def _begin_stretch(events: Events, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    try:
        events.stretches.begin_forward(events.registered, args, kwargs)
    except BudgetError as refusal:
        raise events.refused(refusal) from None


def _gathered(order: CallOrder, label: str, touches: Sequence[Touch], *, is_outside: bool) -> Sequence[Touch]:
    """The touches of a use of weights that are left once these are gathered. `is_outside`: whether no forward of the model uses them."""
    if is_outside:
        expect_no_wrapper(f"{label} was used")
    order.where = f" for {label} outside of a forward" if is_outside else ""
    return order.use(touches)


def _expect_alone(events: Events) -> None:
    """Raises StateError where a forward is under way on another thread, whose end lets go of parameters."""
    threads = sys._current_frames().values() if events._depth and events.stretches.blocks.bound else ()
    if any(frame is events._caller for now in threads for frame in frames(now)):
        raise StateError(
            f"a forward of the model is under way on another thread: call it by one at a time, under a lock{events.advice()}"
        )


def expect_own_parameters(
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    is_managed: Callable[[Tensor], bool],
    advice: Callable[[], str] = str,
) -> None:
    """Raises StateError where the parameters of a model are not those that are managed under these names. `advice`: gives what else would help."""
    found = list(model.parameters())
    if [*map(id, found)] == [*map(id, named.values())] and all(map(is_managed, found)):
        return
    now = dict(model.named_parameters())
    names = [name for name in {**named, **now} if now.get(name) is not named.get(name) or not is_managed(now[name])]
    if is_running_in("torch.nn.utils.stateless"):
        raise StateError(
            f"torch.func.functional_call() gives a managed model other values for {some(names, most=5)}: its own lie in chunks, and cannot be "
            "exchanged for a call. Call a copy, torch.func.functional_call(copy.deepcopy(model), values, inputs), or change the values "
            f"themselves with session.write(name, value){advice()}"
        )
    raise StateError(
        f"parameters of the model were replaced, added or removed after manage(): {some(names, most=5)}. Close the session, change the model "
        "(load_state_dict(assign=True), resize_token_embeddings, adapters, parametrizations), and manage it again"
    )
