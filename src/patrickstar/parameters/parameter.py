"""The classes that managed parameters, and aliases of slots, have for a while. See Note [Binding] in `binding.py`.

These classes are made for each binding anew, so that a tensor leads to its binding without an attribute of its own, and two sessions never meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from patrickstar.torch_private import Plain

__all__ = ["alias_classes", "parameter_class"]


class Handler(Protocol):
    """The binding, as far as the classes of its parameters know it."""

    def handle(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], foreign: Sequence[type] = ()
    ) -> Any:
        """The result of a torch function with parameters or aliases of the binding among its arguments, and tensors of the user's own classes."""

    def ordinary(self, parameter: Tensor) -> nn.Parameter:
        """An ordinary parameter with the values of a managed one."""


def parameter_class(binding: Handler, base: type[Tensor]) -> type[Any]:
    class ManagedParameter(base):  # type: ignore[misc,valid-type]
        """A parameter whose bytes belong to a session. See Note [Binding]."""

        managed_by = binding

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return binding.handle(func, args, kwargs or {}, _others(types) if len(types) > 1 else ())

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            if id(self) not in memo:
                memo[id(self)] = binding.ordinary(self)
            return memo[id(self)]

        def __reduce_ex__(self, protocol: Any) -> Any:
            return binding.ordinary(self).__reduce_ex__(protocol)

        def __repr__(self, **_: Any) -> str:  # torch's own asks for exactly the class `Parameter`
            return repr(binding.ordinary(self))

    return ManagedParameter


def alias_classes(binding: Handler, base: type[Tensor]) -> tuple[type[Tensor], type[Tensor], type[Tensor]]:
    class Alias(base):  # type: ignore[misc,valid-type]
        """A view of a slot that a use has returned. See Note [Binding]."""

        managed_by = binding

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return binding.handle(func, args, kwargs or {}, _others(types) if len(types) > 1 else ())

        def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
            if id(self) not in memo:
                memo[id(self)] = _ordinary_copy(self)
            return memo[id(self)]

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _ordinary_copy(self).__reduce_ex__(protocol)

        # torch's own ask for exactly the class `Tensor`.
        def __repr__(self, **_: Any) -> str:
            return repr(_ordinary_copy(self))

        def __format__(self, spec: str) -> str:
            return format(_ordinary_copy(self), spec)

    class Detached(Alias):
        """A stand-in for the same bytes as a parameter: `weight.detach()`, `weight.data`. See Note [Binding]."""

    class Assembled(Alias):
        """A gradient, or state of the optimizer, that lies in chunks. See Note [Assembled tensors] in `assembled.py`."""

    return Alias, Detached, Assembled


def _others(types: Sequence[type]) -> list[type]:
    """The classes among these that are no session's."""
    return [kind for kind in types if not hasattr(kind, "managed_by")]


def _ordinary_copy(alias: Tensor) -> Tensor:
    copied = alias.clone()
    with Plain():
        copied = copied.detach().requires_grad_(alias.requires_grad)
        copied.__class__ = Tensor
        return copied
