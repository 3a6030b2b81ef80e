"""Classes of managed parameters and of aliases of slots, and what is answered without a use of a parameter's bytes: its shape, an alias of it.

The classes are made for each binding anew, so that a tensor leads to its binding without an attribute of its own, and two sessions never meet. See
Note [Binding] in `binding.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from patrickstar.errors import StateError
from patrickstar.parameters.bound import BoundParameter
from patrickstar.parameters.functions import ESCAPES, HOOKS, NEEDS_NO_DATA, REPOINTS, SHAPE_ONLY, accessor
from patrickstar.parameters.gradient_access import GradientAccess
from patrickstar.parameters.tiles import NOT_ONE_TENSOR
from patrickstar.parameters.transforms import expect_no_transform, expect_no_wrapper
from patrickstar.parameters.weight_access import WeightAccess
from patrickstar.torch_private import Plain, backward_id, is_being_compiled


def managed_classes(
    binding: Any, parameter: type[Tensor], alias: type[Tensor]
) -> tuple[type[Any], type[Tensor], type[Tensor], type[Tensor]]:
    """A binding's classes of parameters, views of slots, detached aliases of parameters, and assembled tensors: subclasses of these two."""
    handle = binding.handle

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
            ordinary: nn.Parameter = binding.ordinary(self)
            return ordinary

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


@dataclass(frozen=True, slots=True)
class Attributes:
    """The answers for managed parameters, and for their detached aliases. `bound`: the records of parameters and tiles, by `id()`."""

    bound: Mapping[int, BoundParameter]
    access: WeightAccess
    gradients: GradientAccess
    detached: DetachedAliases

    def answer(
        self, func: Callable[..., Any], bound: BoundParameter, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The result of a torch function whose first argument is the parameter; NotImplemented where it is a use of its bytes."""
        if bound.tiles and func in HOOKS:
            raise StateError(f"{func.__name__}() was called on {bound.name}, which is used in tiles: {NOT_ONE_TENSOR}")
        if func in NEEDS_NO_DATA:
            return func(*args, **kwargs)
        if func is Tensor.stride and is_being_compiled():
            raise StateError(
                f"torch.compile() of a function that is given {bound.name}, which lies in chunks, bound by use: it would see a placeholder. Compile "
                "blocks (block.compile()) or functions that are given no parameters, such as the loss, or give a larger budget"
            )
        if func in SHAPE_ONLY:
            return func(bound.shape_only, *args[1:], **kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, bound, *args[1:], **kwargs)
        if func in ESCAPES:
            return self._escape(func, bound, *args[1:], **kwargs)
        if func is torch._VF._make_dual:
            raise StateError(
                f"forward-mode differentiation with respect to {bound.name}: parameters that lie in chunks cannot be dual. Use backward(), or a "
                "copy of the model, copy.deepcopy(model)"
            )
        if func.__name__ in REPOINTS:
            raise StateError(not_its_own(bound, f"{func.__name__}() was called on {bound.name}"))
        return NotImplemented

    def _detach(self, bound: BoundParameter) -> Tensor:
        expect_no_transform(f"an alias of {bound.name}")
        expect_no_wrapper(f"{bound.name} was detached")
        return self._in_its_slot(bound) if backward_id() != -1 else self._alias(bound, bound.tensor().detach())

    def _get_data(self, bound: BoundParameter) -> Tensor:
        expect_no_transform(f"an alias of {bound.name}")
        return self._in_its_slot(bound) if backward_id() != -1 else self._alias(bound, bound.tensor().data)

    def _alias(self, bound: BoundParameter, alias: Tensor) -> Tensor:
        if bound in self.access.held:
            alias.data = bound.standin
        return self.detached.make(bound, alias)

    def _in_its_slot(self, bound: BoundParameter) -> Tensor:
        """A view that holds the slot, for use inside of a backward. Checkpointing detaches what a custom Function saves while it recomputes,
        and autograd unpacks that without its class: a stand-in would be taken for values.
        """
        self.access.enter([bound])
        try:
            with torch.inference_mode(False):
                return cast("Tensor", self.access.dress(bound.over(self.access.lease(bound.key))))
        finally:
            self.access.leave([bound])

    def _set_data(self, bound: BoundParameter, value: Tensor) -> None:
        same = self.bound.get(id(value)) or self.detached.of(value)
        # `p.data += x` adds in place, and assigns the alias of the very same bytes.
        if same is not None and same.name == bound.name:
            return
        if hasattr(type(value), "managed_by"):
            place = self.access.find(value)
            is_its_own = place is not None and place[2] is self.access.records[bound.name].parameter
            if is_its_own and (value.shape, value.stride()) == bound.view[:2]:  # `p.data = p.data.contiguous()`
                return
            raise StateError(not_its_own(bound, f"{bound.name}.data was assigned a view of managed memory"))
        tensor = bound.tensor()
        is_alike = (value.shape, value.dtype, value.device) == (tensor.shape, tensor.dtype, tensor.device)
        if bound.is_detached or not is_alike:
            what = f"{bound.name}.data was assigned a tensor {tuple(value.shape)} of {value.dtype} on {value.device}"
            raise StateError(not_its_own(bound, what))
        # The bytes belong to the session: they take the values. What is left of PyTorch's meaning is that `value` becomes an alias.
        with torch.no_grad():
            # Uses, as torch would tell of them: it does not ask classes now.
            use = partial(type(tensor).__torch_function__, types=(type(tensor),))
            self.detached.part(bound.name, lambda: use(Tensor.clone, args=(tensor,)))
            use(Tensor.copy_, args=(self._get_data(bound), value))

    def _escape(self, func: Callable[..., Any], bound: BoundParameter, *args: Any, **kwargs: Any) -> Any:
        """Hands memory out: that of a view of its own, so that what holds the view holds the slot.

        Of an alias that nothing but a number is asked for (`data_ptr()`), the slot stays as long as the alias lives.
        """
        self.access.enter([bound])
        try:
            leased = self.access.lease(bound.key)
            if bound.is_detached:
                self.detached.hold(bound.tensor(), leased)
            self.access.owner.escaped(bound.key)
            with torch.inference_mode(False):
                view = bound.over(leased).requires_grad_(bound.tensor().requires_grad)
            return func(view, *args, **kwargs)
        finally:
            self.access.leave([bound])

    def _set_requires_grad(self, bound: BoundParameter, value: bool = True) -> Tensor:
        tensor = bound.tensor()
        if value and not tensor.requires_grad and not bound.is_detached:
            self.access.owner.thawed(bound.name)
        tensor.requires_grad = value
        if not bound.is_detached:
            self.gradients.watch(bound)
            for tile in bound.tiles:
                tile.parameter.requires_grad = value
                self.gradients.watch(tile)
        return tensor


class DetachedAliases:
    """The living stand-ins of a session for the same bytes as a parameter that are not the parameter. See Note [Binding]."""

    def __init__(self, detached_class: type[Tensor]) -> None:
        self._class = detached_class
        self._known: dict[int, BoundParameter] = {}
        self._leases: dict[int, Tensor] = {}

    def of(self, tensor: object) -> BoundParameter | None:
        """The record of a detached alias; None for any other object."""
        return self._known[id(tensor)] if type(tensor) is self._class else None

    def make(self, bound: BoundParameter, alias: Tensor) -> Tensor:
        """Turns a tensor that torch made of a stand-in, with the version counter that it has, into a stand-in of its own."""
        key, known, leases = id(alias), self._known, self._leases
        reference = weakref.ref(alias, lambda _: (known.pop(key, None), leases.pop(key, None)))
        alias.__class__ = self._class
        living = cast("Callable[[], Tensor]", reference)  # asked for only through the alias itself, so alive
        known[key] = replace(bound, tensor=living, alive=None, is_detached=True, tiles=())
        return alias

    def hold(self, alias: Tensor, leased: Tensor) -> None:
        """Keeps the slot of an alias where it is as long as the alias lives: its address has been asked for."""
        self._leases[id(alias)] = leased

    def part(self, name: str, values: Callable[[], Tensor]) -> None:
        """Turns the aliases of a parameter into ordinary tensors with its values: it is about to get others."""
        found = [alias for alias, bound in self._living() if bound.name == name]
        if not found:
            return
        kept = values()
        for alias in found:
            del self._known[id(alias)]
            self._leases.pop(id(alias), None)
            alias.__class__ = Tensor
            alias.data = kept

    def _living(self) -> list[tuple[Tensor, BoundParameter]]:
        found = [(bound.tensor(), bound) for bound in list(self._known.values())]
        return [(alias, bound) for alias, bound in found if alias is not None]

    def release(self, by_name: Mapping[str, BoundParameter]) -> None:
        """Turns the aliases into ordinary tensors over what their parameters are now."""
        for alias, bound in self._living():
            alias.__class__ = Tensor
            alias.data = by_name[bound.name].parameter.data
        self._known.clear()
        self._leases.clear()


def not_its_own(bound: BoundParameter, what: str) -> str:
    """A message that says what to do instead of giving a parameter other memory."""
    return (
        f"{what}; its bytes belong to a session. Copy into it (`parameter.data.copy_(value)`), use "
        f"session.write({bound.name!r}, value), or change it before manage()"
    )


_SPECIAL: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {
        accessor("grad", "__get__"): lambda own, bound: own.gradients.get(bound),
        accessor("grad", "__set__"): lambda own, bound, value: own.gradients.set(bound, value),
        accessor("grad", "__delete__"): lambda own, bound: own.gradients.set(bound, None),
        accessor("data", "__get__"): Attributes._get_data,
        accessor("data", "__set__"): Attributes._set_data,
        Tensor.detach: Attributes._detach,
        accessor("requires_grad", "__set__"): Attributes._set_requires_grad,
        Tensor.requires_grad_: Attributes._set_requires_grad,
    }
)
