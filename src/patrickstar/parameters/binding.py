"""The binding of parameters to slots that move.

Note [Binding]
    Between uses a managed parameter is a *stand-in*: a NaN expanded to its shape, so that a use which nobody noticed cannot read stale
    bytes. Its class is a subclass of `nn.Parameter` whose `__torch_function__` sees every use at Python level. At a use its unit is fetched,
    a lease over the slot becomes its data, and the stand-in comes back when the operation is done. See also Note [Leases] and
    Note [Saved tensors].
    What a use returns may be a view of the slot (`weight.t()`, `weight[3]`). Such a tensor gets the class `Alias`, which does the same for
    operations on it: what autograd saves of it is packed, and a change made through it is noticed. `weight.detach()` and `weight.data`, which
    people collect in lists (state dicts, averages), are not uses at all: they give another stand-in for the same bytes, of class `Detached`.

Note [Whole]
    Where all model states fit on the tier that computes, beside the worst op of each forward, nothing has to move, and none of this is needed:
    parameters are ordinary ones, each over a storage of its own in its slot, which the lease of that storage keeps in place. Their gradients are
    autograd's own, and the optimizer's step reads them where they lie (`step/optimizer_step.py`). Nobody sees uses. What has to be noticed is asked
    before each forward and step, and before state is read: whether modules have the same parameters, and these the same memory. The first forward
    that does not fit has them bound by use from then on.
    With `step="in_backward"` an update follows the gradient, unless the trace has it that this waits, or somebody has a view of the parameter; a
    tensor that refuses every use stands in `p.grad` from then on, and as long as it does nobody has zeroed the gradient. Until the backward ends the
    parameter is a stand-in: a function or a hook that uses it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge

from patrickstar.core.planes import GradientUse
from patrickstar.errors import StateError
from patrickstar.memory.leases import AssembledKey, Leases
from patrickstar.parameters import functions
from patrickstar.parameters.assembled import AssembledRecord, AssembledTensors, no_memory
from patrickstar.parameters.attributes import Attributes, DetachedAliases, managed_classes
from patrickstar.parameters.bound import BoundParameter, Owner, make_records, names_by_id
from patrickstar.parameters.changes import NOT_COUNTED, Changes, WatchedUse
from patrickstar.parameters.functions import Args, Effects, Function, Kwargs
from patrickstar.parameters.gradient_access import GradientAccess
from patrickstar.parameters.saved import SavedTensors
from patrickstar.parameters.tiles import NOT_ONE_TENSOR, TILED, tile_by_tile
from patrickstar.parameters.transforms import expect_no_transform
from patrickstar.parameters.weight_access import WeightAccess
from patrickstar.parameters.whole_parameters import WholeParameters
from patrickstar.plan.touches import Touches
from patrickstar.torch_private import Plain, transform_level


class Found(NamedTuple):
    """The managed tensors among the arguments of a function, in nested lists, tuples and dicts.

    Attributes:
        parameters: the records of parameters and their detached aliases, each once. aliases: views of slots, and of what is held in the stead of one.
        assembled: the records of gradients and state that lie in chunks, each once.
        others: the bindings of other sessions that have a part in the arguments too.
    """

    parameters: list[BoundParameter]
    aliases: list[Tensor]
    assembled: list[AssembledRecord]
    others: list[Binding]


class Binding:
    """Binds parameters to slots from `let_go` to `release`, or has them keep their bytes from `hold` on.

    Args:
        named: the parameters by name, each once, in layout order.
        owner: who owns the bytes. leases: of the slots in use. touches: what events touch, by uses, which are counted.
        dtypes: what parameters are of while they are managed, by name; fp32 where it says nothing.
        copied: the parameters whose uses see a copy (Note [Copies] in `memory/leases.py`).
        device: where parameters are used; None: where they are now. to_master: as `Changes` has it.
        strides: of parameters that have no bytes now, by name.

    Attributes:
        by_name: records of the parameters. records: records of parameters and tiles. names: of the parameters, by `id()`.
        access: gives parameters their bytes.
        gradients: what `.grad` of a parameter is. assembled: what stands for gradients and for the optimizer's state in chunks.
        changes: what uses change in place. saved: packs what autograd saves.
        parameter_class, plain_class: of parameters between uses, and of ordinary ones.
        whole: the parameters, while they keep their bytes, as `is_whole` says.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        owner: Owner,
        *,
        leases: Leases,
        touches: Touches,
        dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
        copied: Collection[str] = (),
        device: torch.device | None = None,
        whole: bool = False,
        to_master: Callable[[BoundParameter, Tensor | None], None] | None = None,
        strides: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        self.owner = owner
        self.is_whole = whole
        self.device = device
        self.kept_bytes: Callable[[], int] = int  # of gradients that wait for those of other ranks
        self.leases = leases
        self.records = make_records(named, touches.layout, dtypes=dtypes, copied=copied, device=device, strides=strides)
        self.by_name = {name: self.records[name] for name in named}
        self.names = names_by_id(named)
        by_id = {id(bound.parameter): bound for bound in self.records.values()}
        self._bound = {} if whole else by_id.copy()
        self._in_tiles = {key: bound for key, bound in self._bound.items() if bound.tiles}
        self._effects_of = cache(functions.effects_of)

        # Fake tensors are a class of their own, and what stands for them must be a subclass of it.
        base = next((FakeTensor for parameter in named.values() if isinstance(parameter, FakeTensor)), Tensor)
        self.plain_class: type[Any] = nn.Parameter if base is Tensor else base
        classes = managed_classes(self, self.plain_class, base)
        self.parameter_class, self._alias_class, self._detached_class, self._assembled_class = classes
        self.access = WeightAccess(self.records, owner, leases, touches, alias_class=self._alias_class, base=base)
        self.assembled = AssembledTensors(self.access, self._assembled_class, device=device)
        self.changes = Changes(self.access, self.assembled, self._owners_of, touches, to_master)
        widen = touches.gradients is GradientUse.CHUNK and to_master is not None  # there are parameters of 16 bits
        self.gradients = GradientAccess(self.access, self.assembled, touches.gradients, by_id, widen=widen)
        self.whole = WholeParameters(
            access=self.access,
            gradients=self.gradients,
            changes=self.changes,
            by_use=self._bound,
            parameter_class=self.parameter_class,
            device=device or torch.device("cpu"),
        )
        if whole:
            self.gradients.stay_put()
        self.saved = SavedTensors(
            self.access, lasting=self.assembled.lasting, standin=lambda parameter: self._bound[id(parameter)].standin
        )
        self._detached = DetachedAliases(self._detached_class)
        self._attributes = Attributes(self._bound, self.access, self.gradients, self._detached)

    def let_go(self) -> None:
        """Turns parameters into placeholders, which are bound by use from now on. Gradients that they have stay the user's own."""
        self.is_whole = False
        self.whole.forget()
        self.gradients.lie_apart()
        with Plain():
            for bound in self.records.values():
                self._bound[id(bound.parameter)] = bound
                bound.parameter.data = bound.standin
                bound.parameter.__class__ = self.parameter_class
                self.gradients.watch(bound)

    def hold(self) -> None:
        """Gives parameters their bytes for good: they are ordinary ones. See Note [Whole]."""
        self.is_whole = True
        self._bound.clear()
        with Plain():
            for bound in self:
                bound.parameter.__class__ = nn.Parameter
            self.whole.take()

    def release(self, data_of: Callable[[BoundParameter], Tensor | None]) -> None:
        """Turns every parameter into an ordinary one again, with the data given; where that is None, the parameter stays a stand-in."""
        with Plain():
            for bound in self.records.values():
                bound.parameter.__class__ = nn.Parameter
                data = data_of(bound) if bound.owner == bound.name else None
                if data is not None:
                    bound.parameter.data = data
            self.gradients.release()
            self.whole.forget()
            self._detached.release(self.by_name)
            self.assembled.release()

    def bound(self, tensor: object) -> BoundParameter | None:
        """The record of a managed parameter, or of a detached alias of one; else None."""
        # A managed parameter lives as long as its record: nothing else can have its id.
        return self._bound.get(id(tensor)) or self._detached.of(tensor)

    def is_managed(self, tensor: Tensor) -> bool:
        """Tells whether a tensor is a managed parameter, and has the class of one."""
        kinds = (nn.Parameter, self.parameter_class) if self.is_whole else (self.parameter_class,)
        return id(tensor) in self.names and type(tensor) in kinds

    def are_managed(self) -> bool:
        """Tells whether every parameter has the class of one that is managed."""
        kind = nn.Parameter if self.is_whole else self.parameter_class
        return [type(bound.alive) for bound in self.by_name.values()] == [kind] * len(self.by_name)

    def __iter__(self) -> Iterator[BoundParameter]:
        return iter(self.by_name.values())

    def taken_bytes(self) -> int:
        """Bytes of the budget that the user has taken: gradients of the user's own, unless all are, and whole tensors put together."""
        own = 0 if self.is_whole else self.gradients.taken_bytes()
        return own + self.leases.assembled_bytes() + self.kept_bytes()

    def handle(self, func: Function, args: Args, kwargs: Kwargs, foreign: Sequence[Any] = ()) -> Any:
        """The result of a torch function with managed parameters, or aliases of slots, among its arguments.

        `foreign`: classes of the user's among them. They have declined, since ours is another, and are asked again where ours has its bytes.
        """
        if self._in_tiles and func in TILED:
            by_tiles = tile_by_tile(func, args, kwargs, tiled=self._in_tiles)
            if by_tiles is not None:
                return by_tiles
        if func is torch.autograd.grad or func is torch.autograd.backward:
            return differentiate(self, func, args, kwargs)
        with Plain():
            answer = self._answer(func, args[0], args, kwargs) if args else NotImplemented
            if answer is not NotImplemented:
                return answer
            if func in functions.SCATTERS:
                raise StateError(
                    "as_strided_scatter() of a managed parameter: its backward takes the start of memory, where others lie, for that of the "
                    "parameter. Use it on a copy, weight.clone()"
                )
            if func in functions.STRIDED:
                args, kwargs = functions.from_offset(args, kwargs, offset=self._start(args[0]))
            found = Found([], [], [], [])
            self._search(args, found)
            if kwargs:
                self._search(kwargs, found)
            effects = self._effects_of(func)
            if (
                effects.is_foreach
                and len(found.parameters) + len(found.assembled) > 1
                and functions.is_of_several(args, kwargs)
            ):
                self.assembled.expect_room(found.assembled)
                return functions.one_by_one(self.handle, func, args, kwargs)
            return self._use(func, args, kwargs, found=found, effects=effects, foreign=foreign)

    def _answer(self, func: Function, first: Any, args: Args, kwargs: Kwargs) -> Any:
        """The result of a function that needs no bytes of its first argument; NotImplemented where it is a use of them."""
        bound = self._bound.get(id(first))
        if bound is None and type(first) is self._detached_class:
            bound = self._detached.of(first)
        if bound is not None:
            return self._attributes.answer(func, bound, args, kwargs)
        if type(first) is self._assembled_class:
            assembled = self.assembled.of(first)
            assert assembled is not None
            return self.assembled.answer(func, assembled, args, kwargs)
        if func is Tensor.storage_offset and type(first) is self._alias_class:
            return func(first) - self._start(first)
        return NotImplemented

    def _start(self, tensor: Any) -> int:
        """The elements, of a tensor's own type, by which the parameter that it is, or a view of, begins after what is leased."""
        bound = self.bound(tensor)
        if bound is not None:
            return bound.view[2]
        found = self.access.find(tensor) if type(tensor) is self._alias_class else None
        if found is None:
            return 0
        bound = self._bound[id(found[2])]
        return bound.view[2] * bound.shape_only.element_size() // int(tensor.element_size())

    def _search(self, value: Any, found: Found) -> None:
        if isinstance(value, Tensor):
            if type(value) is not Tensor:
                self._add(value, found)
        elif isinstance(value, list | tuple):
            for item in value:
                self._search(item, found)
        elif isinstance(value, dict):
            for item in value.values():
                self._search(item, found)

    def _add(self, tensor: Tensor, found: Found) -> None:
        kind = type(tensor)
        # A managed parameter that is made ordinary for a call is no plain Tensor either.
        bound = self._detached.of(tensor) if kind is self._detached_class else self._bound.get(id(tensor))
        if bound is not None:
            if bound not in found.parameters:
                found.parameters.append(bound)
        elif kind is self._alias_class:
            found.aliases.append(tensor)
        elif kind is self._assembled_class:
            assembled = self.assembled.of(tensor)
            if assembled is not None and assembled not in found.assembled:
                found.assembled.append(assembled)
        else:
            other = getattr(kind, "managed_by", self)
            if other is not self and other not in found.others:
                found.others.append(other)

    def _found(self, value: Any) -> Found:
        found = Found([], [], [], [])
        self._search(value, found)
        return found

    def _join(self, func: Function, others: list[Binding], *args: Any, **kwargs: Any) -> Any:
        """The part of this session in a use that another session's class has caught."""
        found = self._found((args, kwargs))._replace(others=others)
        return self._use(func, args, kwargs, found=found, effects=functions.effects_of(func))

    def _use(
        self, func: Function, args: Args, kwargs: Kwargs, *, found: Found, effects: Effects, foreign: Sequence[Any] = ()
    ) -> Any:
        if transform_level() is not None:
            expect_no_transform(f"{getattr(func, '__name__', func)}() of a managed parameter")
        run = partial(found.others[0]._join, func, found.others[1:]) if found.others else func
        if foreign and not found.others:
            run = partial(_asking, foreign, func)
        if effects.is_foreach:
            run = functions.counted(func, run)
        if found.assembled or (found.aliases and self.leases.assembled_bytes()):
            with self.assembled.using(found.assembled, func, args[0] if args else None):
                return self._use_bound(run, func, args, kwargs, found=found, effects=effects)
        return self._use_bound(run, func, args, kwargs, found=found, effects=effects)

    def _use_bound(
        self, run: Function, func: Function, args: Args, kwargs: Kwargs, *, found: Found, effects: Effects
    ) -> Any:
        if found.aliases:
            self.owner.carry_out_pending()
        self.access.enter(found.parameters)
        try:
            tensors = [bound.tensor() for bound in found.parameters] + found.aliases
            watched = None
            if not effects.only_reads or "out" in kwargs or "inplace" in kwargs:
                watched = self.changes.watch(func, args, kwargs, tensors=tensors)
            versions = [NOT_COUNTED if tensor.is_inference() else tensor._version for tensor in tensors]
            try:
                with self.saved.around_use():
                    result = run(*args, **kwargs)
                if effects.escapes:
                    for key in self.access.keys_of(found.aliases):
                        if isinstance(key, AssembledKey):
                            raise no_memory(func.__name__, key)
                        self.owner.escaped(key)
                return self.access.dress(result)
            finally:
                if watched is not None:
                    self.changes.tell(watched)
                elif versions != [NOT_COUNTED if tensor.is_inference() else tensor._version for tensor in tensors]:
                    self.changes.tell(WatchedUse(func, tensors, versions, {}))
        finally:
            self.access.leave(found.parameters)

    def _owners_of(self, value: Any) -> list[BoundParameter]:
        found = self._found(value)
        places = [self.access.find(alias) for alias in found.aliases]
        owners = [self._bound[id(place[2])] for place in places if place is not None]
        return list({bound.name: self.records[bound.name] for bound in (*found.parameters, *owners)}.values())

    def ordinary(self, parameter: Tensor) -> nn.Parameter:
        """An ordinary parameter with the values of a managed one: what copying and pickling give."""
        with Plain(), torch.no_grad():
            bound = self._bound[id(parameter)]
            self.access.enter([bound])
            try:
                data = bound.parameter.data.clone()
            finally:
                self.access.leave([bound])
            return nn.Parameter(data, bound.parameter.requires_grad)


def differentiate(binding: Binding, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Gradients of parameters, for which their bytes are not needed. `func`, `args`, `kwargs`: as torch's override protocol gives them.

    Backward may recompute, so it must run with parameters as they are. Named by their edges in the graph, they do not bring torch back to us.
    """
    outputs = args[0] if isinstance(args[0], list | tuple) else (args[0],)
    for output in outputs:
        binding.access.undress(output)

    def edges(inputs: Any) -> Any:
        # Managed parameters, and views of slots that a custom Function has detached: all that would bring torch back.
        with Plain():
            return [get_gradient_edge(tensor) if hasattr(type(tensor), "managed_by") else tensor for tensor in inputs]

    if func is torch.autograd.backward:
        inputs = kwargs["inputs"]
        if inputs is not None:
            tiles = [
                tile.parameter for record in map(binding.bound, inputs) if record is not None for tile in record.tiles
            ]
            kwargs = {**kwargs, "inputs": edges([*inputs, *tiles])}
        return func(outputs, **kwargs)
    inputs = args[1]
    if any(record is not None and record.tiles for record in map(binding.bound, inputs)):
        raise StateError(f"torch.autograd.grad() of a parameter that is used in tiles: {NOT_ONE_TENSOR}")
    materialize = kwargs["materialize_grads"]
    asked = {**kwargs, "materialize_grads": False, "allow_unused": materialize or kwargs["allow_unused"]}
    gradients = func(outputs, edges(inputs), **asked)
    if not materialize:
        return gradients
    return tuple(
        gradient
        if gradient is not None
        else torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device, requires_grad=kwargs["create_graph"])
        for gradient, tensor in zip(gradients, inputs, strict=True)
    )


def _asking(kinds: Sequence[Any], func: Function, *args: Any, **kwargs: Any) -> Any:
    """The result of a function as the first of some classes of tensors would have it."""
    return kinds[0].__torch_function__(func, tuple(kinds), args, kwargs)
