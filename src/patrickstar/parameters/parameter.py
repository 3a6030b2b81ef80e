"""The classes that managed parameters, and aliases of slots, have for a while. See Note [Binding] in `binding.py`.

These classes are made for each binding anew, so that a tensor leads to its binding without an attribute of its own, and two sessions never meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from patrickstar.torch_private import Plain


def managed_classes(
    binding: object,
    parameter: type[Tensor],
    alias: type[Tensor],
    *,
    handle: Callable[..., Any],
    ordinary: Callable[[Tensor], nn.Parameter],
) -> tuple[type[Any], type[Tensor], type[Tensor], type[Tensor]]:
    """The classes of parameters, views of slots, detached aliases of parameters, and assembled tensors: subclasses of these two.

    `handle`, `ordinary`: as `Binding` has them.
    """

    class Managed:
        __slots__ = ()
        managed_by = binding
        _ordinary: Any  # gives a tensor without us that has the values of one: what copying and pickling give

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            others = [kind for kind in types if not hasattr(kind, "managed_by")] if len(types) > 1 else ()
            return handle(func, args, kwargs or {}, others)

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
            return ordinary(self)

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


def _ordinary_copy(alias: Tensor) -> Tensor:
    copied = alias.clone()
    with Plain():
        copied = copied.detach().requires_grad_(alias.requires_grad)
        copied.__class__ = Tensor
        return copied
