"""The classes that managed parameters, and aliases of slots, have for a while. See Note [Binding] in `binding.py`.

These classes are made for each binding anew, so that a tensor leads to its binding without an attribute of its own, and two sessions never meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from patrickstar.torch_private import Plain


class Handler(Protocol):
    """The binding, as far as the classes of its parameters know it."""

    def handle(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], foreign: Sequence[type] = ()
    ) -> Any:
        """The result of a torch function with parameters or aliases of the binding among its arguments, and tensors of the user's own classes."""

    def ordinary(self, parameter: Tensor) -> nn.Parameter:
        """An ordinary parameter with the values of a managed one."""


def managed_classes(
    binding: Handler, parameter: type[Tensor], alias: type[Tensor]
) -> tuple[type[Any], type[Tensor], type[Tensor], type[Tensor]]:
    """The classes of parameters, views of slots, detached aliases of parameters, and assembled tensors: subclasses of these two."""

    class Managed:
        __slots__ = ()
        managed_by = binding
        _ordinary: Any  # gives a tensor without us that has the values of one: what copying and pickling give

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return binding.handle(func, args, kwargs or {}, _others(types) if len(types) > 1 else ())

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            if id(self) not in memo:
                memo[id(self)] = self._ordinary()
            return memo[id(self)]

        def __reduce_ex__(self, protocol: Any) -> Any:
            return self._ordinary().__reduce_ex__(protocol)

        def __repr__(self, **_: Any) -> str:  # torch's own asks for exactly the class `Parameter`, or `Tensor`
            return repr(self._ordinary())

    class ManagedParameter(Managed, parameter):  # type: ignore[misc,valid-type]
        """A parameter whose bytes belong to a session. See Note [Binding]."""

        def _ordinary(self) -> nn.Parameter:
            return binding.ordinary(self)

    class Alias(Managed, alias):  # type: ignore[misc,valid-type]
        """A view of a slot that a use has returned. See Note [Binding]."""

        _ordinary = _ordinary_copy

        def __format__(self, spec: str) -> str:
            return format(self._ordinary(), spec)

    class Detached(Alias):
        """A stand-in for the same bytes as a parameter: `weight.detach()`, `weight.data`. See Note [Binding]."""

    class Assembled(Alias):
        """A gradient, or state of the optimizer, that lies in chunks. See Note [Assembled tensors] in `assembled.py`."""

    return ManagedParameter, Alias, Detached, Assembled


def _others(types: Sequence[type]) -> list[type]:
    """The classes among these that are no session's."""
    return [kind for kind in types if not hasattr(kind, "managed_by")]


def _ordinary_copy(alias: Tensor) -> Tensor:
    copied = alias.clone()
    with Plain():
        copied = copied.detach().requires_grad_(alias.requires_grad)
        copied.__class__ = Tensor
        return copied
