"""Parameters in use: how they get their bytes, how these are taken away again, and what lies in them meanwhile."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Touch
from patrickstar.errors import StateError
from patrickstar.memory.leases import AssembledKey, Key, Leases, WeightKey
from patrickstar.parameters.bound import BoundParameter, Owner
from patrickstar.parameters.transforms import expect_no_transform
from patrickstar.plan.touches import Touches
from patrickstar.torch_private import NotInference, Plain, backward_id, transform_level

Tell = Callable[[str, Sequence[Touch]], None]


@dataclass(eq=False)
class WeightAccess:
    """Gives parameters the bytes of their units, or of copies, for as long as they are used.

    Attributes:
        records: of parameters and tiles, by name. owner: brings the bytes. leases: of the slots in use. touches: count uses.
        alias_class: of views of slots that a use has returned. base: the class of ordinary tensors.
        lock: held while bytes are given and taken. held: how many uses and module calls hold a parameter now, of those that are held.
        open: parameters that a block's backward holds, each with the 1-D tensor that it lies in, which is the same for all who ask meanwhile.
        in_blocks: parameters of blocks, by `id()`.
        updated: bytes, by name, of parameters that keep them and that the backward under way has updated, so that it must not use them any more.
        is_surprised: whether a backward has wanted one of these.
        recomputed: versions of parameters, by `id()`, at which a recomputation of a forward, in backward, has left them.
    """

    records: Mapping[str, BoundParameter]
    owner: Owner
    leases: Leases
    touches: Touches
    alias_class: type[Tensor]
    base: type[Tensor]

    held: dict[BoundParameter, int] = field(default_factory=dict, init=False)
    open: dict[BoundParameter, Tensor] = field(default_factory=dict, init=False)
    in_blocks: set[int] = field(default_factory=set, init=False)
    updated: dict[str, Tensor] = field(default_factory=dict, init=False)
    is_surprised: bool = field(default=False, init=False)
    recomputed: dict[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        # Those in a unit, or in what is gathered, by rising offset, in bytes.
        self._in_unit: dict[WeightKey, tuple[list[int], list[BoundParameter]]] = {}
        in_units = [bound for bound in self.records.values() if not bound.tiles]
        for bound in sorted(in_units, key=lambda bound: bound.offset):
            key = bound.ref if bound.group is None else bound.group
            starts, owners = self._in_unit.setdefault(key, ([], []))
            starts.append(bound.offset * bound.shape_only.element_size())
            owners.append(bound)

    def enter(self, found: Sequence[BoundParameter], tell: Tell | None = None) -> Mapping[WeightKey, Tensor]:
        """Gives parameters bytes, in the tensors given back; each has one `leave`. `tell`: fetches units; None: as for a use, which is counted."""
        if not found:
            return {}
        if transform_level() is not None:
            expect_no_transform(f"a use of {found[0].name}")
        if self.updated and tell is None and backward_id() != -1:
            self._expect_none_updated(found)
        with self.lock:
            touches = found[0].touches
            if len(found) > 1:
                touches = tuple(sorted({touch for bound in found for touch in bound.touches}))
            if tell is None and backward_id() == -1:  # else it is part of a recomputation
                self._count(found)
            leased = self._fetched(found, touches, tell or self.owner.use)
            for bound in found:
                self.held[bound] = self.held[bound] + 1 if bound in self.held else 1
                if self.held[bound] == 1:
                    with NotInference():
                        bound.tensor().data = torch.as_strided(leased[bound.key], *bound.view)
            return leased

    def _expect_none_updated(self, found: Sequence[BoundParameter]) -> None:
        """Raises StateError where a use in the backward would see a value of after the update. See Note [Updates in backward]."""
        for bound in found:
            if bound.name in self.updated:
                self.is_surprised = True
                raise StateError(
                    f'{bound.name} is used by a backward that has updated it already (step="in_backward"): a function or a hook uses it there, and '
                    'no trace of the forward shows that. Manage with step="deferred", or call session.load_checkpoint(dir) and go on: from now on '
                    "updates wait until the backward ends"
                )

    def _fetched(
        self, found: Sequence[BoundParameter], touches: Sequence[Touch], tell: Tell
    ) -> dict[WeightKey, Tensor]:
        """The leases of parameters, by key, whose units are fetched where no open block holds them."""
        if self.open.keys() >= set(found):
            return {bound.key: self.open[bound] for bound in found}
        if self.open and self.open.keys().isdisjoint(found):
            self.close()  # a backward is elsewhere
        tell(found[0].name, touches)
        of_group = found[0].group is not None  # whose units were there for as long as they were gathered
        leased: dict[WeightKey, Tensor] = {} if of_group else {t.ref: self.leases.take(t.ref) for t in touches}
        for bound in found:  # none of these units may leave while copies are made
            if bound.key not in leased:
                leased[bound.key] = self.lease(bound.key)
        return leased

    def _count(self, found: Sequence[BoundParameter]) -> None:
        """Counts a use of these parameters: apart from the graph where autograd does not record it as one of the parameters themselves."""
        counts, in_graph = self.touches, torch.is_grad_enabled()
        for bound in found:
            in_graph = in_graph and not bound.is_detached
        for bound in found:
            counts.uses[bound.name] = counts.uses.get(bound.name, 0) + 1
            if not in_graph:
                counts.apart[bound.name] = counts.apart.get(bound.name, 0) + 1

    def lease(self, key: WeightKey) -> Tensor:
        """The 1-D tensor that is leased at a use: over a resident unit's slot, or the copy of a parameter whose units are resident."""
        return self.leases.take(key) if isinstance(key, PlaneRef) else self.leases.take_copy(key, self.owner.make_copy)

    def leave(self, found: Sequence[BoundParameter]) -> None:
        """Takes the bytes of parameters away again; whatever else holds a slot keeps it."""
        with self.lock:
            for bound in found:
                self.held[bound] -= 1
                if not self.held[bound]:
                    del self.held[bound]
                    bound.tensor().data = bound.standin

    def close(self) -> None:
        """Takes the bytes of those parameters away that the backward of a block holds."""
        if self.open:
            held = list(self.open)
            self.open.clear()
            with self.lock, Plain():
                self.leave(held)

    def dress(self, result: Any) -> Any:
        """The result of a use, in which views of slots now have the class `Alias`."""
        if isinstance(result, Tensor):
            is_new = not hasattr(type(result), "managed_by")
            if is_new and result.layout is torch.strided and self.leases.locate(result) is not None:
                result.__class__ = self.alias_class
        elif isinstance(result, list | tuple):
            for item in result:
                self.dress(item)
        return result

    def undress(self, tensor: Tensor) -> None:
        """Makes a view of a slot an ordinary tensor."""
        if type(tensor) is self.alias_class:
            tensor.__class__ = self.base

    def keys_of(self, tensors: Iterable[Tensor]) -> list[Key]:
        """The units, copies and assembled tensors that these lie in, as far as they are leased."""
        places = (self.leases.locate(tensor) for tensor in tensors)
        return [place.key for place in places if place is not None]

    def find(self, tensor: Tensor) -> tuple[WeightKey, int, nn.Parameter] | None:
        """The unit or copy that a tensor lies in, the bytes from the start of that to its first element, and the parameter there."""
        if tensor.layout is not torch.strided:
            return None
        place = self.leases.locate(tensor)
        if place is None or isinstance(place.key, AssembledKey):
            return None
        if place.key not in self._in_unit:
            return place.key, place.offset_bytes, self.records[str(place.key)].parameter
        starts, owners = self._in_unit[place.key]
        return place.key, place.offset_bytes, owners[bisect_right(starts, place.offset_bytes) - 1].tensor()  # type: ignore[return-value]

    def parameters_in(self, key: WeightKey) -> Sequence[BoundParameter]:
        """The parameters that lie in a weight unit, by rising offset, or the parameter of a copy."""
        return self._in_unit[key][1] if key in self._in_unit else [self.records[str(key)]]

    def unpack(self, key: WeightKey) -> Tensor:
        """The 1-D tensor over a unit or a copy, for a backward that needs what a use has saved."""
        with self.lock, Plain():
            found = self._in_unit[key][1] if key in self._in_unit else [self.records[key]]  # type: ignore[index]
            for bound in found:
                if bound in self.open and bound.key == key:
                    return self.open[bound]
            self.close()  # the backward is elsewhere
            first, units = found[0], list[Tensor]()
            if first.group is not None:
                self.owner.unpack(first.name, first.touches)
                return self.lease(key)
            for ref in first.refs:
                self.owner.unpack(first.name, (Touch(ref),))
                units.append(self.leases.take(ref))
            return units[0] if key == first.refs[0] else self.lease(key)
