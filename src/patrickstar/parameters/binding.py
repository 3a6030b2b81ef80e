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

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from patrickstar.core.gradient_use import GradientUse
from patrickstar.core.layout import Layout
from patrickstar.core.plane import EXP_AVG, EXP_AVG_SQ
from patrickstar.errors import StateError
from patrickstar.memory.leases import AssembledKey, Key, Leases, WeightKey
from patrickstar.parameters.assembled import STEP, AssembledTensors
from patrickstar.parameters.attributes import Attributes, not_its_own
from patrickstar.parameters.bound import BoundParameter
from patrickstar.parameters.changes import Changes
from patrickstar.parameters.detached import DetachedAliases
from patrickstar.parameters.differentiate import differentiate
from patrickstar.parameters.foreach import counted, is_foreach, one_by_one
from patrickstar.parameters.found import Found
from patrickstar.parameters.functions import ESCAPES
from patrickstar.parameters.gradient_access import GradientAccess
from patrickstar.parameters.owner import Owner
from patrickstar.parameters.parameter import alias_classes, parameter_class
from patrickstar.parameters.places import Places
from patrickstar.parameters.records import make_records, names_by_id, with_tiles
from patrickstar.parameters.saved import SavedTensors
from patrickstar.parameters.tiles import tile_by_tile
from patrickstar.torch_private import Plain

__all__ = ["Binding"]


class Binding:
    """Binds parameters to slots from `bind` to `release`.

    Args:
        named: the parameters by name, each once, in layout order.
        owner: who owns the bytes. dtypes: what parameters are of while they are managed, by name; fp32 where it says nothing.
        copied: the parameters whose uses see a copy (Note [Copies] in `leases.py`). gradients: where they go.
        gathers_rows: whether lookups in tables bring rows from where these rest.

    Attributes:
        by_name: the parameters' records. records: these, and those of tiles. names: of the parameters, by `id()`.
        leases: of the slots in use. places: whose they are.
        gradients: what `.grad` of a parameter is. assembled: what stands for gradients and for the optimizer's state in chunks.
        changes: what uses change in place.
        session_name: how messages call the session that this binding is part of.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        layout: Layout,
        owner: Owner,
        *,
        dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
        copied: Collection[str] = (),
        gathers_rows: bool = False,
        gradients: GradientUse = GradientUse.CHUNK,
    ) -> None:
        self._owner = owner
        self.leases = Leases(owner.wrap)
        self.lock = threading.RLock()
        # Fake tensors are a class of their own, and what stands for them must be a subclass of it.
        self._base: type[Tensor] = next(
            (FakeTensor for parameter in named.values() if isinstance(parameter, FakeTensor)), Tensor
        )
        self._parameter_class = parameter_class(self, nn.Parameter if self._base is Tensor else self._base)
        self._alias_class, detached_class, assembled_class = alias_classes(self, self._base)
        self._detached = DetachedAliases(detached_class)
        self._attributes = Attributes(self, owner, self._detached)
        self.assembled = AssembledTensors(owner, self.leases, self.lock, assembled_class)

        self.session_name = "a session"
        self.records = make_records(named, layout, dtypes=dtypes, copied=copied, gathers_rows=gathers_rows)
        self.by_name = {name: self.records[name] for name in named}
        self.names = names_by_id(named)
        self._bound = {id(bound.parameter): bound for bound in self.records.values()}
        self._in_tiles = {key: bound for key, bound in self._bound.items() if bound.tiles}
        self.places = Places(self.records)
        self.changes = Changes(
            owner, self.records, take=self.leases.take, owners_of=self._owners_of, keys_of=self._keys_of
        )
        self._saved = SavedTensors(
            self._find, self._fetch, self.assembled.lasting, was_recomputed=self.changes.was_recomputed
        )
        self.gradients = GradientAccess(
            self.records, owner, self.lock, assembled=self.assembled, undress=self._undress, use=gradients
        )

    # binding and releasing

    def changing(self, names: Iterable[str]) -> None:
        """The parameters' values change: what autograd saved of them before is out of date."""
        with Plain():
            torch.autograd.graph.increment_version([bound.parameter for bound in with_tiles(self.records, names)])

    def changed_by_update(self, names: Iterable[str]) -> None:
        """The parameters' values have changed: so have copies that somebody still holds."""
        names = list(names)
        self.changing(names)
        living = self.leases.living()
        for bound in with_tiles(self.records, names) if living else ():
            if bound.name in living:
                self._owner.renew(bound.name, self.leases.take(bound.name))
        self._owner.updated()

    def stepped(self, names: Iterable[str]) -> None:
        """An update has changed the parameters, or tiles, and what the optimizer keeps of them."""
        names = list(names)
        self.changed_by_update(names)
        for owner in dict.fromkeys(self.records[name].owner for name in names):
            for plane in (EXP_AVG, EXP_AVG_SQ, STEP):
                self.assembled.changed(AssembledKey(owner, plane))

    def bind(self) -> None:
        """Turns every parameter into a managed one. Its old data is let go."""
        with Plain():
            for bound in self._bound.values():
                bound.parameter.data = bound.standin
                bound.parameter.__class__ = self._parameter_class
                self.gradients.watch(bound)

    def release(self, data_of: Callable[[BoundParameter], Tensor | None]) -> None:
        """Turns every parameter into an ordinary one again, with the data given; None: it stays a stand-in."""
        with Plain():
            for bound in self._bound.values():
                for handle in bound.handles:
                    handle.remove()
                bound.handles.clear()
                bound.parameter.__class__ = nn.Parameter
                data = data_of(bound) if bound.owner == bound.name else None
                if data is not None:
                    bound.parameter.data = data
            self.gradients.own.clear()
            self._detached.release(self.by_name)
            self.assembled.release()

    def bound(self, tensor: object) -> BoundParameter | None:
        """The record of a managed parameter, or of a detached alias of one; else None."""
        # A managed parameter lives as long as its record: nothing else can have its id.
        return self._bound.get(id(tensor)) or self._detached.of(tensor)

    def is_managed(self, tensor: Tensor) -> bool:
        """Whether this is a managed parameter, and has the class of one."""
        return id(tensor) in self._bound and type(tensor) is self._parameter_class

    def __iter__(self) -> Iterator[BoundParameter]:
        return iter(self.by_name.values())

    def taken_bytes(self) -> int:
        """What of the budget the user has taken: gradients of the user's own, whole tensors put together."""
        return self.gradients.own_bytes() + self.assembled.taken_bytes()

    # one use

    def handle(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a torch function does with managed parameters, or aliases of slots, among its arguments."""
        by_tiles = tile_by_tile(func, args, kwargs, tiled=self._tiled, owner=self._owner)
        if by_tiles is not None:
            return by_tiles()
        if func is torch.autograd.grad or func is torch.autograd.backward:
            return differentiate(func, args, kwargs, bound=self.bound, undress=self._undress)
        with Plain():
            first = args[0] if args else None
            bound = self.bound(first)
            if bound is not None:
                answer = self._attributes.answer(func, bound, args, kwargs)
                if answer is not NotImplemented:
                    return answer
            assembled = self.assembled.of(first)
            if assembled is not None:
                answer = self.assembled.answer(func, assembled, args, kwargs)
                if answer is not NotImplemented:
                    return answer
            found = self._found((args, kwargs))
            if len(found.parameters) + len(found.assembled) > 1 and is_foreach(func):
                self.assembled.expect_room(found.assembled)
                return one_by_one(self.handle, func, args, kwargs)
            return self._use(func, args, kwargs, found=found, others=found.others)

    def _tiled(self, tensor: object) -> BoundParameter | None:
        return self._in_tiles.get(id(tensor))

    def _found(self, values: Any) -> Found:
        return Found(self, values, bound=self.bound, alias_class=self._alias_class)

    def _join(self, func: Callable[..., Any], others: Sequence[Binding], *args: Any, **kwargs: Any) -> Any:
        """The part of this session in a use that another session's class has caught."""
        return self._use(func, args, kwargs, found=self._found((args, kwargs)), others=others)

    def _use(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        found: Found,
        others: Sequence[Binding],
    ) -> Any:
        run = counted(func, partial(others[0]._join, func, others[1:]) if others else func)
        if found.assembled or (found.aliases and self.leases.assembled_bytes()):
            with self.assembled.using(found.assembled, func, args[0] if args else None):
                return self._use_bound(run, func, args, kwargs, found=found)
        return self._use_bound(run, func, args, kwargs, found=found)

    def _use_bound(
        self,
        run: Callable[..., Any],
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        found: Found,
    ) -> Any:
        if found.aliases:
            self._owner.carry_out_pending()
        self.enter(found.parameters)
        try:
            tensors = [*(bound.parameter for bound in found.parameters), *found.aliases]
            watched = self.changes.watch(func, args, kwargs, tensors=tensors)
            try:
                with self._saved.around_use():
                    result = run(*args, **kwargs)
                if func in ESCAPES:
                    for key in self._keys_of(found.aliases):
                        if isinstance(key, AssembledKey):
                            raise self.assembled.no_memory(func.__name__, key)
                        self._owner.escaped(key)
                return self.dress(result)
            finally:
                self.changes.tell(watched)
        finally:
            self.leave(found.parameters)

    def _owners_of(self, value: Any) -> list[BoundParameter]:
        """The parameters whose bytes these tensors are."""
        found = self._found(value)
        places = [self._find(alias) for alias in found.aliases]
        owners = [self._bound[id(place[2])] for place in places if place is not None]
        return list({bound.name: self.records[bound.name] for bound in (*found.parameters, *owners)}.values())

    def enter(self, found: Sequence[BoundParameter]) -> None:
        """Gives parameters their bytes. Each `enter` has one `leave`."""
        if not found:
            return
        with self.lock:
            refs = sorted({ref for bound in found for ref in bound.refs})
            in_graph = torch.is_grad_enabled() and not any(self._detached.is_one(bound.tensor()) for bound in found)
            for bound in found:
                if not bound.depth and self._moved(bound):
                    bound.parameter.data = bound.standin
                    raise StateError(not_its_own(bound, f"set_() gave {bound.name} other memory"))
            self._owner.use(refs, [bound.name for bound in found], in_graph=in_graph)
            units = [self.leases.take(ref) for ref in refs]  # none may leave while copies are made
            leased = {bound.key: self.leases.take(bound.key) for bound in found}
            del units
            for bound in found:
                bound.depth += 1
                if bound.depth == 1:
                    with torch.inference_mode(False):
                        bound.parameter.data = bound.over(leased[bound.key])

    def _moved(self, bound: BoundParameter) -> bool:
        """Whether `set_()`, which no class sees, has put something in the place of the stand-in."""
        return self._base is Tensor and bound.parameter.data_ptr() != bound.standin.data_ptr()

    def leave(self, found: Sequence[BoundParameter]) -> None:
        """Takes parameters' bytes away again; what else holds the slot keeps it."""
        with self.lock:
            for bound in found:
                bound.depth -= 1
                if not bound.depth:
                    bound.parameter.data = bound.standin

    # what uses return and autograd saves

    def dress(self, result: Any) -> Any:
        """What a use has returned: views of slots have the class for that."""
        if isinstance(result, Tensor):
            if type(result) is self._base and result.layout is torch.strided and self.leases.locate(result) is not None:
                result.__class__ = self._alias_class
        elif isinstance(result, list | tuple):
            for item in result:
                self.dress(item)
        return result

    def _undress(self, tensor: Tensor) -> None:
        if type(tensor) is self._alias_class:
            tensor.__class__ = self._base

    def _keys_of(self, tensors: Iterable[Tensor]) -> list[Key]:
        places = (self.leases.locate(tensor) for tensor in tensors)
        return [place.key for place in places if place is not None]

    def _find(self, tensor: Tensor) -> tuple[WeightKey, int, nn.Parameter] | None:
        if tensor.layout is not torch.strided:
            return None
        place = self.leases.locate(tensor)
        if place is None or isinstance(place.key, AssembledKey):
            return None
        return place.key, place.offset, self.places.owner(place.key, place.offset).parameter

    def _fetch(self, key: WeightKey) -> Tensor:
        with self.lock, Plain():
            first = self.places.parameters_in(key)[0]
            units = []
            for ref in first.refs:
                self._owner.unpack(ref, first.name)
                units.append(self.leases.take(ref))
            return units[0] if key == first.ref else self.leases.take(key)

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
