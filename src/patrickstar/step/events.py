"""Answers the binding and the root module's hooks: the session's side of every event of a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Phase, Touch
from patrickstar.errors import StateError, some
from patrickstar.memory.leases import AssembledKey, CopyKey, WeightKey
from patrickstar.parameters.escapes import EscapedMemory
from patrickstar.parameters.lookups import WaitingRows
from patrickstar.plan.touches import Touches
from patrickstar.step.assembling import Assembling
from patrickstar.step.copies import Copies
from patrickstar.step.executor import Executor
from patrickstar.step.late_planes import LatePlanes
from patrickstar.step.stretches import Stretches
from patrickstar.step.tables import TableRows
from patrickstar.step.training import Training
from patrickstar.torch_private import backward_id, backward_makes_graph

__all__ = ["Events"]


class Events:
    """Owns the bytes of parameters, as far as the binding is concerned.

    Made before the binding, which needs it, and connected to what needs the binding afterwards.

    Attributes:
        seconds: of the last forward and backward.
    """

    _executor: Executor
    _stretches: Stretches
    _training: Training | None
    _escaped: EscapedMemory
    _copies: Copies
    _late_planes: LatePlanes
    _assembling: Assembling | None
    _tables: TableRows
    _is_managed: Callable[[Tensor], bool]

    def __init__(
        self,
        *,
        model: nn.Module,
        named: Mapping[str, nn.Parameter],
        touches: Touches,
        compute: torch.dtype = torch.float32,
    ) -> None:
        self._model = model
        self._named = named
        self._expected = [id(parameter) for parameter in model.parameters()]
        self.touches = touches
        self._compute = compute

        self.seconds: dict[str, float] = {"forward": 0.0, "backward": 0.0}
        self._rows = WaitingRows()
        self._depth = 0
        self._handled: BaseException | None = None
        self._in_backward = False
        self._began_s = 0.0
        self._backward_began_s = 0.0

    def connect(
        self,
        *,
        executor: Executor,
        stretches: Stretches,
        training: Training | None,
        escaped: EscapedMemory,
        copies: Copies,
        late_planes: LatePlanes,
        assembling: Assembling | None,
        tables: TableRows,
        is_managed: Callable[[Tensor], bool],
    ) -> None:
        """Everything that events are passed on to."""
        self._executor = executor
        self._stretches = stretches
        self._training = training
        self._escaped = escaped
        self._copies = copies
        self._late_planes = late_planes
        self._assembling = assembling
        self._tables = tables
        self._is_managed = is_managed

    # the binding's owner

    def use(self, touches: Sequence[Touch], names: Sequence[str], *, in_graph: bool) -> None:  # noqa: ARG002
        """See `parameters.owner.Owner`."""
        if self._escaped.watched:
            self._escaped.check()
        if backward_id() == -1:
            self._executor.moment(Phase.FORWARD, names[0], touches)
            return
        self._in_backward = True
        if self._training is not None:
            self._training.backwards.notice_recomputation()
        self._executor.moment(Phase.RECOMPUTE, names[0], touches)

    def carry_out_pending(self) -> None:
        """See `parameters.binding.Owner`."""
        self._executor.settle()

    def unpack(self, ref: PlaneRef, name: str) -> None:
        """See `parameters.binding.Owner`."""
        self.check_watch()
        self._in_backward = True
        if backward_makes_graph():
            self._stretches.differentiates()
        phase, touches = self.touches.unpack(ref)
        self._executor.moment(phase, name, touches)

    def make_copy(self, key: CopyKey) -> Tensor:
        """See `parameters.assembled.AssembledOwner`."""
        return self._kept().make(key) if isinstance(key, AssembledKey) else self._copies.make(key)

    def renew(self, key: str | AssembledKey, copy: Tensor) -> None:
        """See `parameters.binding.Owner`."""
        if isinstance(key, AssembledKey):
            self._kept().renew(key, copy)
        else:
            self._copies.renew(key, copy)

    def changed(self, key: WeightKey) -> None:
        """See `parameters.binding.Owner`."""
        if not isinstance(key, PlaneRef):
            self._copies.changed(key)
            return
        self._executor.store.wrote(key)
        phase = self._executor.change_phase()
        if phase is not Phase.STEP:
            # A moment of its own: a plan that has it keeps what was written; where the trace has none, the plan ends here.
            label = self.touches.layout.run_of(key.chunk).tensors[0]
            self._executor.moment(phase, label, (Touch(key, True),))

    def escaped(self, key: WeightKey) -> None:
        """See `parameters.binding.Owner`."""
        self._escaped.add(key)

    def _kept(self) -> Assembling:
        assert self._assembling is not None, "weights alone have neither gradients nor moments"
        return self._assembling

    def settle(self) -> None:
        """See `parameters.assembled.AssembledOwner`."""
        if backward_id() == -1 and not self._depth:  # between stretches: one that is over is
            self.forget_abandoned_backward()
            self._stretches.pause()
        self.check_watch()
        self._executor.settle()

    def expect_room(self, key: AssembledKey) -> None:
        """See `parameters.assembled.AssembledOwner`."""
        self._kept().expect_room(key)

    def assembled_changed(self, key: AssembledKey, *, wholly: bool) -> None:
        """See `parameters.assembled.AssembledOwner`."""
        self._kept().changed(key, wholly=wholly)

    def updated(self) -> None:
        """See `parameters.binding.Owner`."""
        if self._escaped.watched:
            self._escaped.renew()

    def thawed(self, name: str) -> None:
        """See `parameters.binding.Owner`."""
        if self._training is not None:
            self._late_planes.thaw(name)

    def gradient(self, name: str, gradient: Tensor) -> None:
        """See `parameters.binding.Owner`."""
        self.check_watch()
        if gradient.layout is not torch.strided:
            raise StateError(
                f"{name} has a gradient of layout {gradient.layout}: sparse gradients cannot be managed; use sparse=False"
            )
        now = time.perf_counter()
        if not self._backward_began_s:
            self._backward_began_s = now
        assert self._training is not None
        self._training.gradient(name, gradient)
        self.seconds["backward"] = time.perf_counter() - self._backward_began_s

    def gather(self, name: str, ids: Tensor, values: Tensor, *, in_graph: bool) -> None:
        """See `parameters.lookups.RowOwner`."""
        self.check_watch()
        inside = backward_id() != -1
        self._in_backward |= inside
        phase, rows = self.touches.lookup(name, values.numel(), in_graph=in_graph, in_backward=inside)
        self._tables.gather(phase, name, rows, ids, values)

    def row_gradients(self, name: str, ids: Tensor, gradient: Tensor, padding: int | None) -> None:
        """See `parameters.lookups.RowOwner`."""
        self.check_watch()
        assert self._training is not None
        self._in_backward = True
        self._rows.add(name, ids, gradient, padding)
        self._training.arrives()

    def bring_rows(self) -> None:
        """The innermost backward ends: gradients of rows that it has brought are complete."""
        for gradients in self._rows.take():
            self._tables.add_gradient(gradients, deliver=self.gradient)

    def has_gradient(self, name: str) -> bool:
        """See `parameters.binding.Owner`."""
        return self._training is not None and self._training.has_gradient(name)

    def drop_gradient(self, name: str) -> None:
        """See `parameters.binding.Owner`."""
        if self._training is not None:
            self._training.drop_gradient(name)

    # memory that was handed out

    @property
    def watches(self) -> bool:
        """Whether somebody may write to a weight unseen."""
        return bool(self._escaped.watched)

    def check_watch(self) -> None:
        """What was written unseen is carried to where it belongs."""
        if self._escaped.watched:
            self._escaped.check()

    # the root module's calls

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward of the model begins. BudgetError before anything has changed where it does not fit."""
        if self._depth:
            self._depth += 1
            return args, kwargs
        self.expect_own_parameters()
        if self._training is not None:
            self._training.begin_forward()
        self.check_watch()
        self._executor.settle()
        args, kwargs = cast_inputs((args, kwargs), self._compute)
        with self._executor.lock:
            self._stretches.begin_forward(module, self._named, args, kwargs)
        self.touches.begin_forward()
        self._rows.clear()
        self._depth = 1
        self._in_backward = False
        self._handled = sys.exc_info()[1]
        self._began_s, self._backward_began_s = time.perf_counter(), 0.0
        return args, kwargs

    def after_forward(self, module: nn.Module) -> None:  # noqa: ARG002
        """A forward has ended, or was left by an exception."""
        if not self._depth:
            return  # refused before it began
        self._depth -= 1
        if self._depth:
            return
        if (
            sys.exc_info()[1] is not self._handled
        ):  # hooks that are always called are called while the exception is on its way
            self._stretches.abandon()
        self.seconds["forward"] = time.perf_counter() - self._began_s
        self._backward_began_s = time.perf_counter()
        if not torch.is_grad_enabled():
            self._stretches.end()

    def forget_abandoned_backward(self) -> None:
        """State is about to be read or written, by nobody inside of a backward: one that has begun is over, by its end or by an exception."""
        if self._in_backward and backward_id() == -1:
            self._in_backward = False
            self._stretches.abandon()

    def expect_own_parameters(self) -> None:
        """Raises StateError where the model's parameters are not those that are managed."""
        found = list(self._model.parameters())
        if [id(parameter) for parameter in found] == self._expected and all(map(self._is_managed, found)):
            return
        now = dict(self._model.named_parameters())
        names = [
            name
            for name in {**self._named, **now}
            if now.get(name) is not self._named.get(name) or not self._is_managed(now[name])
        ]
        raise StateError(
            f"parameters of the model were replaced, added or removed after manage(): {some(names, most=5)}. Close the session, change the model "
            "(load_state_dict(assign=True), resize_token_embeddings, adapters, parametrizations), and manage it again"
        )


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """The same inputs with floating tensors in this type, in nested containers too; what needs no cast is the very same object."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype is not dtype else value
    if type(value) is dict:
        items = {name: cast_inputs(item, dtype) for name, item in value.items()}
        return items if any(items[name] is not value[name] for name in value) else value
    if isinstance(value, list | tuple):
        cast = [cast_inputs(item, dtype) for item in value]
        if all(new is old for new, old in zip(cast, value, strict=True)):
            return value
        return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)
    return value
