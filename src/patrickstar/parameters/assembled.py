"""Gradients and the optimizer's state, which lie in chunks, as tensors that have bytes only while an operation uses them.

Note [Assembled tensors]
    What `p.grad` gives, and what the entries of `optimizer.state` are, is a stand-in: a NaN expanded to the shape, of the class `Assembled`,
    whose `__torch_function__` sees every use. At a use the tensor is put together from its chunks, and the stand-in comes back when the
    operation is done. If its version has changed by then, it is written back. So a list of all gradients holds no bytes.
    What was put together is leased as copies of weights are (Note [Copies] in `memory/leases.py`): as long as anything holds it, such as a view that
    a use has returned, it is the same one for everybody. A change made through one view is seen through all, and written back; a change where it
    lies (another backward, a step) is written into it. It counts against the budget.
    A tensor whose contents were let go (`zero_grad()`) has nothing to show: its uses are refused. Views of what was put together before are
    ordinary memory from then on, with the last values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from patrickstar.core.planes import GRAD
from patrickstar.errors import StateError
from patrickstar.memory.leases import AssembledKey
from patrickstar.parameters.bound import placeholder
from patrickstar.parameters.functions import ESCAPES, NEEDS_NO_DATA, REPOINTS, SHAPE_ONLY, accessor
from patrickstar.parameters.transforms import expect_no_transform
from patrickstar.parameters.weight_access import WeightAccess

_STAYS = frozenset({Tensor.requires_grad_, accessor("requires_grad", "__set__"), accessor("grad", "__get__")})
_ANOTHER = frozenset({Tensor.detach, accessor("data", "__get__")})
_SET_DATA = accessor("data", "__set__")
_OVERWRITES = frozenset({"zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_"})


@dataclass(slots=True, eq=False)
class AssembledValue:
    """The gradient or state that assembled tensors show. `gone`: why there is nothing to show any more."""

    key: AssembledKey
    shape_only: Tensor
    standin: Tensor
    gone: str = ""


@dataclass(slots=True, eq=False)
class AssembledRecord:
    """One assembled tensor, and what it shows. `depth`: uses that hold it now."""

    tensor: Callable[[], Tensor]
    source: AssembledValue
    depth: int = 0


def title(key: AssembledKey) -> str:
    """The name of such a tensor in messages."""
    return f"{key.name}.grad" if key.plane == GRAD else f"optimizer.state[{key.name}][{key.plane!r}]"


class AssembledTensors:
    """The assembled tensors of one binding. `tensors`: by key, of what is kept and was asked for."""

    def __init__(self, access: WeightAccess, assembled_class: type[Tensor], *, device: torch.device | None) -> None:
        self._device = device
        self._owner, self._leases, self._lock = access.owner, access.leases, access.lock
        self._class = assembled_class

        # One for all: on a device a number takes 512 bytes.
        self._nan = cache(partial(placeholder, device=device))
        self.tensors: dict[AssembledKey, Tensor] = {}
        self._known: dict[int, AssembledRecord] = {}

    def tensor(self, key: AssembledKey, shape_only: Tensor) -> Tensor:
        """The tensor that stands for what is kept: one until that is let go. `shape_only`: a meta tensor of its shape, strides and type."""
        if key not in self.tensors:
            self.tensors[key] = self._made(key, shape_only)
        return self.tensors[key]

    def gone(self, key: AssembledKey, shape_only: Tensor, why: str) -> Tensor:
        """A tensor that stands for what was let go: there is one, and each use of it is refused. `why`: for that."""
        return self._made(key, shape_only, why)

    def _made(self, key: AssembledKey, shape_only: Tensor, gone: str = "") -> Tensor:
        expect_no_transform(f"a use of {title(key)}")
        with torch.inference_mode(False):
            source = AssembledValue(key, shape_only, self._nan(shape_only.dtype).expand(shape_only.shape), gone)
            made = torch.empty(0, dtype=shape_only.dtype, device=self._device)
            made.data = source.standin  # not made of it: all would have one version counter
        return self._dress(made, source)

    def _dress(self, tensor: Tensor, source: AssembledValue) -> Tensor:
        number, known = id(tensor), self._known
        reference = weakref.ref(tensor, lambda _: known.pop(number, None))
        tensor.__class__ = self._class
        known[number] = AssembledRecord(reference, source)  # type: ignore[arg-type]  # asked for through the tensor itself, so alive
        return tensor

    def of(self, tensor: object) -> AssembledRecord | None:
        """The record of an assembled tensor; None for any other object."""
        return self._known[id(tensor)] if type(tensor) is self._class else None

    def answer(
        self, func: Callable[..., Any], of: AssembledRecord, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The result of a function that needs no bytes of its first tensor; NotImplemented where it is a use of them."""
        if func in NEEDS_NO_DATA or func in _STAYS:
            return func(*args, **kwargs)
        if func in SHAPE_ONLY:
            return func(of.source.shape_only, *args[1:], **kwargs)
        _expect_there(of.source)
        if func in _ANOTHER:
            return self._another(of, func)
        if func == _SET_DATA:
            return self._set_data(of, *args[1:])
        if func in ESCAPES:
            raise no_memory(func.__name__, of.source.key)
        if func.__name__ in REPOINTS:
            what = title(of.source.key)
            raise StateError(
                f"{func.__name__}() was called on {what}, which lies in chunks and has its own shape: use {what}.clone()"
            )
        return NotImplemented

    def _another(self, of: AssembledRecord, func: Callable[..., Any]) -> Tensor:
        """Another stand-in for the same bytes (`detach()`, `.data`), with the version counter that torch gives it."""
        expect_no_transform(f"an alias of {title(of.source.key)}")
        made: Tensor = func(of.tensor())
        if of.depth:
            made.data = of.source.standin
        return self._dress(made, of.source)

    def _set_data(self, of: AssembledRecord, value: Tensor) -> None:
        if not self.is_of(value, of.source.key):
            what = title(of.source.key)
            raise StateError(
                f"{what}.data was assigned another tensor; it lies in chunks: copy into it, {what}.copy_(value)"
            )

    def is_of(self, value: object, key: AssembledKey) -> bool:
        """Tells whether a value stands for what has this key, now. StateError where it stands for what was let go."""
        record = self.of(value)
        if record is None:
            return False
        _expect_there(record.source)
        return record.source.key == key

    @contextmanager
    def using(self, records: Sequence[AssembledRecord], func: Callable[..., Any], first: object) -> Iterator[None]:
        """Gives tensors their bytes, all at once, and takes these away again; those that `func`, with `first`, has changed are written back.

        Raises:
            BudgetError: the bytes do not fit. StateError: a tensor has nothing to show any more.
        """
        self._owner.settle()
        with self._lock:
            for of in records:
                _expect_there(of.source)
            leased = [self._leases.take_copy(of.source.key, self._owner.make_copy) for of in records]
            for of, copy in zip(records, leased, strict=True):
                of.depth += 1
                if of.depth == 1:
                    shape_only = of.source.shape_only
                    with torch.inference_mode(False):
                        of.tensor().data = copy.as_strided(shape_only.shape, shape_only.stride(), 0)
            del leased
        versions = [of.tensor()._version for of in records]
        try:
            yield
        finally:
            with self._lock:
                try:
                    changed = [of for of, was in zip(records, versions, strict=True) if of.tensor()._version != was]
                    head = first[0] if isinstance(first, list | tuple) and first else first
                    wholly = func.__name__ in _OVERWRITES and len(changed) == 1 and self.of(head) is changed[0]
                    for key in dict.fromkeys(of.source.key for of in changed if not of.source.gone):
                        self._owner.assembled_changed(key, wholly=wholly)
                finally:
                    for of in records:
                        of.depth -= 1
                        if not of.depth:
                            of.tensor().data = of.source.standin

    def expect_room(self, records: Sequence[AssembledRecord]) -> None:
        """Raises BudgetError where there is no room for one of these tensors, alone: before the first of many is changed."""
        self._owner.settle()
        for of in records:
            _expect_there(of.source)
            self._owner.expect_room(of.source.key)

    def lasting(self, tensor: Tensor) -> Tensor:
        """A tensor that autograd may keep of one in use: of an assembled tensor, an alias that keeps its bytes."""
        return tensor.detach() if type(tensor) is self._class else tensor

    def changed(self, key: AssembledKey) -> None:
        """Shows new values of what is kept to whoever holds a view of it, and to autograd that it was changed."""
        tensor = self.tensors.get(key)
        if tensor is None:
            return
        torch.autograd.graph.increment_version(tensor)
        if key in self._leases.living():
            self._owner.renew(key, self._leases.take_copy(key, self._owner.make_copy))

    def dropped(self, key: AssembledKey, why: str) -> None:
        """Lets a tensor go whose gradient or state is let go. `why`: for the error of a later use."""
        tensor = self.tensors.pop(key, None)
        if tensor is not None:
            self._known[id(tensor)].source.gone = why
            self._leases.disown(key)

    def release(self) -> None:
        """Lets all tensors go: the session ends."""
        for key in list(self.tensors):
            self.dropped(key, "the session was closed")


def no_memory(asked: str, key: AssembledKey) -> StateError:
    """The error that refuses memory which would outlive the use."""
    what = title(key)
    return StateError(
        f"{asked} of {what} asks for memory that outlives the use: it lies in chunks, and has memory of its own only while an operation uses "
        f"it. {what}.clone() is an ordinary tensor; to change it, use operations of torch"
    )


def _expect_there(source: AssembledValue) -> None:
    if source.gone:
        what = title(source.key)
        raise StateError(
            f"{what} was used after {source.gone}: it lies in chunks, and has the values of the time of its use. Read it anew, or take a "
            f"copy while it is there, {what}.clone()"
        )
