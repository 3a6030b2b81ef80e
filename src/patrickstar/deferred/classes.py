"""The classes of parameters that have no memory yet, and of aliases of them. See Note [Deferred] in `recording.py`.

While modules are built, parameters are `nn.Parameter` itself, and `deferred_init()` sees what is done with aliases before their class does.
Afterwards the classes let nobody read or write values that are not there. They are made for one context each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def deferred_classes(recorder: object, label: Callable[[Tensor], str]) -> tuple[type[Any], type[Any]]:
    """Classes for the parameters of one recorder, and for views of them, which let nobody read what is not there. `label`: names them in messages."""

    class Deferred:
        __slots__ = ()
        deferred_by = recorder
        _kind: str

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in _ALLOWED:
                ours: Any = next(leaf for leaf in _pytree.tree_leaves((args, kwargs)) if type(leaf) is cls)
                raise _has_no_values(label(ours), getattr(func, "__name__", str(func)))
            with Plain():
                return func(*args, **(kwargs or {}))

        def __repr__(self: Any, **_: Any) -> str:
            with Plain():
                return f"{self._kind} of shape {tuple(self.shape)}, {self.dtype}, without values until manage()"

        def __reduce_ex__(self: Any, protocol: Any) -> Any:
            raise _has_no_values(label(self), "pickle")

    class DeferredParameter(Deferred, nn.Parameter):  # type: ignore[misc]
        """A parameter whose values are made when it is managed."""

        _kind = "Parameter"

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            raise _has_no_values(label(self), "copy.deepcopy")

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


def _has_no_values(label: str, what: str) -> StateError:
    return StateError(
        f"{what}() was called on {label}, which was built under deferred_init() and has no values yet: call "
        "patrickstar.manage() first, or do this inside of deferred_init()"
    )
