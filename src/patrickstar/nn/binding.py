"""The binding of parameters to slots that move.

Note [Binding]
    Between uses a managed parameter is a *stand-in*: a NaN expanded to its shape, so that a use which nobody noticed cannot read stale
    bytes. Its class is a subclass of `nn.Parameter` whose `__torch_function__` sees every use at Python level. At a use its unit is fetched,
    a lease over the slot becomes its data, and the stand-in comes back when the operation is done. See also Note [Leases] and
    Note [Saved tensors].
    What a use returns may be a view of the slot (`weight.t()`, `weight[3]`). Such a tensor gets the class `Alias`, which does the same for
    operations on it: what autograd saves of it is packed, and a change made through it is noticed. `weight.detach()` and `weight.data`, which
    people collect in lists (state dicts, averages), are not uses at all: they give another stand-in for the same bytes, of class `Detached`.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from patrickstar.core.layout import Layout
from patrickstar.core.plane import PlaneRef
from patrickstar.errors import StateError
from patrickstar.nn.functions import ESCAPES, NEEDS_NO_DATA, SHAPE_ONLY
from patrickstar.nn.leases import Leases
from patrickstar.nn.packing import Packing
from patrickstar.torch_private import Plain

__all__ = ["Binding", "BoundParameter", "Owner"]


class Owner(Protocol):
    """Who owns the bytes: the session, or a recorder that only writes down what is asked for."""

    def use(self, refs: Sequence[PlaneRef], label: str) -> None:
        """Makes the units resident, all at once. BudgetError where they cannot be."""

    def wrap(self, ref: PlaneRef) -> Tensor:
        """A 1-D tensor over a fresh storage of the slot that holds this resident unit."""

    def changed(self, ref: PlaneRef) -> None:
        """A weight unit's bytes have been written in place."""

    def escaped(self, ref: PlaneRef) -> None:
        """Memory of a weight unit has been handed out to code that can write to it unseen."""

    def gradient(self, name: str, gradient: Tensor) -> None:
        """A gradient has arrived in backward. Takes it."""

    def read_gradient(self, name: str) -> Tensor | None:
        """The gradient accumulated so far, as a tensor whose in-place changes count; None where there is none."""

    def drop_gradient(self, name: str) -> None:
        """The gradient accumulated so far is no longer wanted."""


@dataclass(slots=True, eq=False)
class BoundParameter:
    """A parameter, and where its bytes are.

    `shape_only` is a meta tensor with the parameter's shape and strides; `offset` is in elements from the unit's start. Dense parameters
    keep their strides (channels last, say), others are contiguous in their slot. `tensor` gives the parameter, or a detached alias of it
    (Note [Binding]), which the record does not keep alive.
    """

    name: str
    tensor: Callable[[], Tensor]
    ref: PlaneRef
    offset: int
    shape_only: Tensor

    standin: Tensor
    depth: int = 0  # uses and module calls that hold it now
    keeps_own_gradient: bool = False  # `p.grad = tensor` was written by the user: `.grad` is theirs until it is None again
    handles: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself."""
        return self.tensor()  # type: ignore[return-value]

    def over(self, unit: Tensor) -> Tensor:
        """The parameter's values in a 1-D tensor over its unit."""
        return torch.as_strided(unit, self.shape_only.shape, self.shape_only.stride(), self.offset)


class Binding:
    """Binds parameters to slots from `bind` to `release`.

    Args:
        named: the parameters by name, each once, in layout order.
        owner: who owns the bytes.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], layout: Layout, owner: Owner) -> None:
        self._owner = owner
        self.leases = Leases(owner.wrap)
        self.lock = threading.RLock()
        self._packing = Packing(self._find, self._fetch)
        self._parameter_class = _parameter_class(self)
        self._alias_class, self._detached_class = _alias_classes(self)
        self._detached: dict[int, tuple[weakref.ref[Tensor], BoundParameter]] = {}

        nans: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._bound: dict[int, BoundParameter] = {}
        self.by_name: dict[str, BoundParameter] = {}
        for name, parameter in named.items():
            piece = layout.slices[name]
            kind = (parameter.dtype, parameter.device)
            if kind not in nans:
                nans[kind] = torch.full((1,), float("nan"), dtype=kind[0], device=kind[1])
            shape_only = torch.empty_strided(parameter.shape, slot_strides(parameter), dtype=parameter.dtype, device="meta")
            standin = nans[kind].expand(parameter.shape)
            bound = BoundParameter(name, partial(_itself, parameter), layout.weight_unit(name), piece.offset, shape_only, standin)
            self._bound[id(parameter)] = self.by_name[name] = bound
        self._starts: dict[PlaneRef, tuple[list[int], list[BoundParameter]]] = {}
        for bound in sorted(self._bound.values(), key=lambda bound: bound.offset):
            starts, owners = self._starts.setdefault(bound.ref, ([], []))
            starts.append(bound.offset)
            owners.append(bound)

    # binding and releasing

    def bind(self) -> None:
        """Turns every parameter into a managed one. Its old data is let go."""
        with Plain():
            for bound in self._bound.values():
                bound.parameter.data = bound.standin
                bound.parameter.__class__ = self._parameter_class
                self._watch_gradient(bound)

    def release(self, data_of: Callable[[BoundParameter], Tensor]) -> None:
        """Turns every parameter into an ordinary one again, with the data given."""
        with Plain():
            for bound in self._bound.values():
                for handle in bound.handles:
                    handle.remove()
                bound.handles.clear()
                bound.parameter.__class__ = nn.Parameter
                bound.parameter.data = data_of(bound)
            for reference, bound in list(self._detached.values()):
                tensor = reference()
                if tensor is not None:
                    tensor.__class__ = Tensor
                    tensor.data = self.by_name[bound.name].parameter.data
            self._detached.clear()

    def bound(self, tensor: object) -> BoundParameter | None:
        """The record of a managed parameter, or of a detached alias of one; else None."""
        found = self._bound.get(id(tensor))
        if found is not None:
            return found  # a managed parameter lives as long as its record: nothing else can have its id
        if type(tensor) is self._detached_class:
            return self._detached[id(tensor)][1]
        return None

    def __iter__(self) -> Iterator[BoundParameter]:
        return iter(self.by_name.values())

    # one use

    def handle(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a torch function does with managed parameters, or aliases of slots, among its arguments."""
        if func is torch.autograd.grad or func is torch.autograd.backward:
            return self._differentiate(func, args, kwargs)
        with Plain():
            first = args[0] if args else None
            bound = self.bound(first)
            if bound is not None:
                if func in NEEDS_NO_DATA:
                    return func(*args, **kwargs)
                if func in SHAPE_ONLY:
                    return func(bound.shape_only, *args[1:], **kwargs)
                special = _SPECIAL.get(func)
                if special is not None:
                    return special(self, bound, *args[1:], **kwargs)
            found: dict[int, BoundParameter] = {}
            aliases: list[Tensor] = []
            self._search((args, kwargs), found, aliases)
            if len(found) > 1 and func.__name__.startswith("_foreach_"):
                return self._one_by_one(func, args, kwargs)
            return self._use(func, args, kwargs, list(found.values()), aliases)

    def _one_by_one(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A foreach function tensor by tensor, so that what it is given need not be resident all at once. Same arithmetic, same bits."""
        length = len(args[0])

        def item(value: Any, index: int) -> Any:
            return [value[index]] if isinstance(value, list | tuple) and len(value) == length else value

        results: list[Any] = []
        for index in range(length):
            result = self.handle(func, [item(value, index) for value in args], {key: item(value, index) for key, value in kwargs.items()})
            results.extend(result if result is not None else ())
        return results or None

    def _differentiate(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`torch.autograd.grad` and `backward` with parameters as inputs: gradients of them, for which their bytes are not needed.

        Backward may recompute, so this runs with parameters as they are; named by their edges in the graph, they do not bring us back here.
        """
        outputs = args[0] if isinstance(args[0], list | tuple) else (args[0],)
        for output in outputs:
            if type(output) is self._alias_class:
                output.__class__ = Tensor

        def edges(inputs: Any) -> Any:
            with Plain():
                return [get_gradient_edge(tensor) if self.bound(tensor) is not None else tensor for tensor in inputs]

        inputs = args[1] if func is torch.autograd.grad else kwargs["inputs"]
        if func is torch.autograd.backward:
            return func(outputs, **{**kwargs, "inputs": None if inputs is None else edges(inputs)})
        materialize = kwargs["materialize_grads"]
        asked = {**kwargs, "materialize_grads": False, "allow_unused": materialize or kwargs["allow_unused"]}
        gradients = func(outputs, edges(inputs), **asked)
        if not materialize:
            return gradients
        return tuple(
            gradient if gradient is not None else torch.zeros(tensor.shape, dtype=tensor.dtype, requires_grad=kwargs["create_graph"])
            for gradient, tensor in zip(gradients, inputs, strict=True)
        )

    def _use(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        found: list[BoundParameter],
        aliases: list[Tensor],
    ) -> Any:
        self.enter(found)
        written = [*(bound.parameter for bound in found), *aliases]
        versions = [-1 if tensor.is_inference() else tensor._version for tensor in written]
        try:
            with self._packing.around_use():
                result = func(*args, **kwargs)
            if func in ESCAPES:
                for ref in {*(bound.ref for bound in found), *(self._units_of(aliases))}:
                    self._owner.escaped(ref)
            return self._dress(result)
        finally:
            for tensor, version in zip(written, versions, strict=True):
                if version >= 0 and tensor._version != version:
                    bound = self.bound(tensor)
                    for ref in self._units_of([tensor]) if bound is None else [bound.ref]:
                        self._owner.changed(ref)
            self.leave(found)

    def enter(self, found: Sequence[BoundParameter]) -> None:
        """Gives parameters their bytes. Each `enter` has one `leave`."""
        if not found:
            return
        with self.lock:
            refs = sorted({bound.ref for bound in found})
            self._owner.use(refs, found[0].name)
            units = {ref: self.leases.take(ref) for ref in refs}
            for bound in found:
                bound.depth += 1
                if bound.depth == 1:
                    with torch.inference_mode(False):
                        bound.parameter.data = bound.over(units[bound.ref])

    def leave(self, found: Sequence[BoundParameter]) -> None:
        """Takes parameters' bytes away again; what else holds the slot keeps it."""
        with self.lock:
            for bound in found:
                bound.depth -= 1
                if not bound.depth:
                    bound.parameter.data = bound.standin

    @contextmanager
    def plain_class(self, found: Iterable[BoundParameter]) -> Iterator[None]:
        """Parameters of the ordinary class for a while, for code that refuses subclasses (torch's fused encoder paths)."""
        found = list(found)
        for bound in found:
            bound.parameter.__class__ = nn.Parameter
        try:
            yield
        finally:
            for bound in found:
                bound.parameter.__class__ = self._parameter_class

    # what uses return and autograd saves

    def _search(self, value: Any, found: dict[int, BoundParameter], aliases: list[Tensor]) -> None:
        if isinstance(value, Tensor):
            bound = self.bound(value)
            if bound is not None:
                found[id(value)] = bound
            elif type(value) is self._alias_class:
                aliases.append(value)
        elif isinstance(value, list | tuple):
            for item in value:
                self._search(item, found, aliases)
        elif isinstance(value, dict):
            for item in value.values():
                self._search(item, found, aliases)

    def _dress(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            if type(result) is Tensor and result.layout is torch.strided and self.leases.locate(result) is not None:
                result.__class__ = self._alias_class
        elif isinstance(result, list | tuple):
            for item in result:
                self._dress(item)
        return result

    def _units_of(self, tensors: Iterable[Tensor]) -> list[PlaneRef]:
        places = (self.leases.locate(tensor) for tensor in tensors)
        return [place.ref for place in places if place is not None]

    def _find(self, tensor: Tensor) -> tuple[PlaneRef, int, nn.Parameter] | None:
        if tensor.layout is not torch.strided:
            return None
        place = self.leases.locate(tensor)
        if place is None:
            return None
        starts, owners = self._starts[place.ref]
        return place.ref, place.offset, owners[bisect.bisect_right(starts, place.offset) - 1].parameter

    def _fetch(self, ref: PlaneRef) -> Tensor:
        with self.lock, Plain():
            self._owner.use([ref], self._starts[ref][1][0].name)
            return self.leases.take(ref)

    # gradients

    def _watch_gradient(self, bound: BoundParameter) -> None:
        if bound.parameter.requires_grad and not bound.handles:
            handle = bound.parameter.register_post_accumulate_grad_hook(self._take_gradient)
            bound.handles.append(handle)
            # Ours comes first, so that the user's hooks see the accumulated gradient, as in PyTorch. torch walks the plain dict underneath the
            # ordered one: only the order of insertion counts.
            hooks = bound.parameter._post_accumulate_grad_hooks
            others = [(key, hook) for key, hook in hooks.items() if key != handle.id]
            for key, _ in others:
                del hooks[key]
            hooks.update(others)

    def _take_gradient(self, parameter: Tensor) -> None:
        with self.lock, Plain():
            bound = self._bound[id(parameter)]
            gradient = parameter.grad
            if gradient is None or bound.keeps_own_gradient:
                return
            parameter.grad = None
            self._owner.gradient(bound.name, gradient)

    def _get_gradient(self, bound: BoundParameter) -> Tensor | None:
        own = bound.tensor().grad
        if bound.tensor() is not self.by_name[bound.name].tensor():
            return own  # a detached alias has a gradient of its own, as in PyTorch
        return own if own is not None else self._owner.read_gradient(bound.name)

    def _set_gradient(self, bound: BoundParameter, value: Tensor | None) -> None:
        bound.tensor().grad = value  # torch's own checks of shape, type and device
        if bound.tensor() is not self.by_name[bound.name].tensor():
            return
        bound.keeps_own_gradient = value is not None
        self._owner.drop_gradient(bound.name)

    def _delete_gradient(self, bound: BoundParameter) -> None:
        self._set_gradient(bound, None)

    # the rest of what is special about a parameter

    def _detach(self, bound: BoundParameter) -> Tensor:
        return self._alias_of(bound, bound.tensor().detach())

    def _get_data(self, bound: BoundParameter) -> Tensor:
        return self._alias_of(bound, bound.tensor().data)

    def _alias_of(self, bound: BoundParameter, alias: Tensor) -> Tensor:
        """Turns what torch gave for the stand-in, with the version counter it has, into a stand-in of its own."""
        if bound.depth:
            alias.data = bound.standin
        key, known = id(alias), self._detached
        reference = weakref.ref(alias, lambda _: known.pop(key, None))
        alias.__class__ = self._detached_class
        known[key] = reference, BoundParameter(bound.name, reference, bound.ref, bound.offset, bound.shape_only, bound.standin)  # type: ignore[arg-type]
        return alias

    def _set_data(self, bound: BoundParameter, value: Tensor) -> None:
        if value is not bound.parameter:
            raise StateError(
                f"{bound.name}.data was assigned a tensor {tuple(value.shape)} of {value.dtype} on {value.device}; its bytes belong to "
                "a session. Copy into it (`parameter.data.copy_(value)`), use session.write(name, value), or change it before manage()"
            )

    def _set_requires_grad(self, bound: BoundParameter, value: bool = True) -> Tensor:
        tensor = bound.tensor()
        tensor.requires_grad = value
        if tensor is self.by_name[bound.name].tensor():
            self._watch_gradient(bound)
        return tensor

    def ordinary(self, parameter: Tensor) -> nn.Parameter:
        """An ordinary parameter with the same values: what copying and pickling give."""
        with Plain(), torch.no_grad():
            bound = self._bound[id(parameter)]
            self.enter([bound])
            try:
                data = bound.parameter.data.clone()
            finally:
                self.leave([bound])
            return nn.Parameter(data, bound.parameter.requires_grad)


_SPECIAL: Mapping[Callable[..., Any], Callable[..., Any]] = {
    Tensor.grad.__get__: Binding._get_gradient,
    Tensor.grad.__set__: Binding._set_gradient,
    Tensor.grad.__delete__: Binding._delete_gradient,
    Tensor.data.__get__: Binding._get_data,
    Tensor.data.__set__: Binding._set_data,
    Tensor.detach: Binding._detach,
    Tensor.requires_grad.__set__: Binding._set_requires_grad,
    Tensor.requires_grad_: Binding._set_requires_grad,
}


def slot_strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's strides where it fills its memory without gaps or overlaps, else those of a contiguous tensor."""
    expected = 1
    for size, stride in sorted(zip(parameter.shape, parameter.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1:
            if stride != expected:
                return torch.empty(parameter.shape, device="meta").stride()
            expected *= size
    return parameter.stride()


def _parameter_class(binding: Binding) -> type[nn.Parameter]:
    class ManagedParameter(nn.Parameter):
        """A parameter whose bytes belong to a session. See Note [Binding]."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG003
            return binding.handle(func, args, kwargs or {})

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            if id(self) not in memo:
                memo[id(self)] = binding.ordinary(self)
            return memo[id(self)]  # type: ignore[no-any-return]

        def __reduce_ex__(self, protocol: Any) -> Any:
            return binding.ordinary(self).__reduce_ex__(protocol)

    return ManagedParameter


def _alias_classes(binding: Binding) -> tuple[type[Tensor], type[Tensor]]:
    class Alias(Tensor):
        """A view of a slot that a use has returned. See Note [Binding]."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG003
            return binding.handle(func, args, kwargs or {})

        def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
            if id(self) not in memo:
                memo[id(self)] = _ordinary_copy(self)
            return memo[id(self)]  # type: ignore[no-any-return]

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _ordinary_copy(self).__reduce_ex__(protocol)

    class Detached(Alias):
        """A stand-in for the same bytes as a parameter: `weight.detach()`, `weight.data`. See Note [Binding]."""

    return Alias, Detached


def _itself(parameter: nn.Parameter) -> nn.Parameter:
    return parameter


def _ordinary_copy(alias: Tensor) -> Tensor:
    copied = alias.clone()
    with Plain():
        copied = copied.detach().requires_grad_(alias.requires_grad)
        copied.__class__ = Tensor
        return copied
