"""The classes of parameters that have no memory yet, and of aliases of them. See Note [Deferred] in `recording.py`.

While modules are built, parameters are `nn.Parameter` itself, and `deferred_init()` sees what is done with aliases before their class does.
Afterwards the classes let nobody read or write values that are not there. They are made for one context each, as those in `classes.py` are
for one binding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils import _pytree

from patrickstar.errors import StateError
from patrickstar.parameters.functions import NEEDS_NO_DATA, SHAPE_ONLY, accessor
from patrickstar.torch_private import Plain

_ALLOWED = (
    NEEDS_NO_DATA
    | SHAPE_ONLY
    | {Tensor.requires_grad_, accessor("requires_grad", "__set__")}
    | {accessor("grad", kind) for kind in ("__get__", "__set__", "__delete__")}
)


class Records(Protocol):
    """The recorder, as far as the classes of its parameters know it."""

    def label(self, tensor: Tensor) -> str:
        """The name of a parameter in messages."""


def deferred_classes(recorder: Records) -> tuple[type[Any], type[Any]]:
    """Classes for the parameters of one recorder, and for views of them, which let nobody read what is not there."""

    class Deferred:
        __slots__ = ()
        deferred_by = recorder
        _kind: str

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return _answer(cls, func, args, kwargs or {})

        def __repr__(self: Any, **_: Any) -> str:
            with Plain():
                return f"{self._kind} of shape {tuple(self.shape)}, {self.dtype}, without values until manage()"

        def __reduce_ex__(self: Any, protocol: Any) -> Any:
            raise _has_no_values(recorder.label(self), "pickle")

    class DeferredParameter(Deferred, nn.Parameter):  # type: ignore[misc]
        """A parameter whose values are made when it is managed."""

        _kind = "Parameter"

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            raise _has_no_values(recorder.label(self), "copy.deepcopy")

    class DeferredAlias(Deferred, Tensor):  # type: ignore[misc]
        """A view of a deferred parameter, its `.data`, `detach()`."""

        _kind = "Tensor"

        def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
            if id(self) not in memo:
                copy = self.clone()
                memo[id(self)] = nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy
            copied: Tensor = memo[id(self)]
            return copied

    return DeferredParameter, DeferredAlias


def _answer(cls: Any, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if func not in _ALLOWED:
        ours = next(leaf for leaf in _pytree.tree_leaves((args, kwargs)) if type(leaf) is cls)
        raise _has_no_values(cls.deferred_by.label(ours), getattr(func, "__name__", str(func)))
    with Plain():
        return func(*args, **kwargs)


def _has_no_values(label: str, what: str) -> StateError:
    return StateError(
        f"{what}() was called on {label}, which was built under deferred_init() and has no values yet: call "
        "patrickstar.manage() first, or do this inside of deferred_init()"
    )
