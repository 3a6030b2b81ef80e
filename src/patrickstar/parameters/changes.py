"""Changes of weights in place, by a use: how such a change is noticed, and who is told.

Note [Changes in place]
    torch counts the changes of every tensor, its views included (`_version`): what has more of them after a use than before it has been
    written, whatever the operation is called. A forward may do that itself (`nn.Embedding(max_norm=)`, `weight.clamp_()` under `no_grad`), and
    then its trace must have the change, or the plan would drop as clean what is dirty. So the owner is told while the bytes are still held, in
    a trial run as in earnest, and a change is a moment of its own, which writes what the use before it has only read.
    Where more is kept than a weight shows (a split master), its elements must be compared with what they were. That is remembered before
    operations that write by their name, their arguments or their schema; a change by any other is an error.
    Of parameters that keep their bytes (Note [Whole] in `binding.py`) nobody sees uses: such elements are remembered all the time, and compared
    before an update and where a master is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, STEP, PlaneRef
from patrickstar.errors import StateError
from patrickstar.memory.leases import AssembledKey, WeightKey
from patrickstar.parameters.assembled import AssembledTensors
from patrickstar.parameters.bound import BoundParameter, with_tiles
from patrickstar.parameters.functions import Args, Function, Kwargs, uncounted, writes_to
from patrickstar.parameters.weight_access import WeightAccess
from patrickstar.plan.touches import Touches
from patrickstar.torch_private import Plain, backward_id

NOT_COUNTED, _CHANGES = -1, -2
"""Versions, in the place of a count of changes, of a tensor whose changes nobody counts, and of one that changes whatever is counted."""


class UnseenChangeError(StateError):
    """A weight was changed in place by an operation of which nothing told that it would."""


@dataclass(frozen=True, slots=True)
class WatchedUse:
    """A use that may change something: what is called, its tensors and the version of each, and what elements were, by parameter."""

    what: object
    tensors: Sequence[Tensor]
    versions: Sequence[int]
    before: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Changes:
    """The one who notices what uses change.

    Attributes:
        access: whose owner is told. assembled: what stands for the optimizer's state.
        owners_of: gives the records of the parameters that tensors, in nested containers, are or lie in.
        touches: knows of which parameters more is kept than they show. to_master: carries a change in place of a resident one there, if anybody
            does, given what its elements were, 1-D in slot order; None: nobody knows, and all of them count as changed.
        followed: of parameters that keep their bytes, and of which more is kept: their elements, by name; None for copies, which are compared with
            what is kept.
    """

    access: WeightAccess
    assembled: AssembledTensors
    owners_of: Callable[[Any], list[BoundParameter]]
    touches: Touches
    to_master: Callable[[BoundParameter, Tensor | None], None] | None
    followed: dict[str, Tensor | None] = field(default_factory=dict)

    def watch(self, func: Function, args: Args, kwargs: Kwargs, *, tensors: Sequence[Tensor]) -> WatchedUse:
        """The watch over a function that is about to run, given these parameters, and views of slots, whose bytes are there."""
        hidden = {id(tensor) for tensor in uncounted(func, args, kwargs)}
        versions = [
            _CHANGES if id(tensor) in hidden else NOT_COUNTED if tensor.is_inference() else tensor._version
            for tensor in tensors
        ]
        written = writes_to(func, args, kwargs) if self.to_master is not None else None
        before = {} if written is None else self.remember(self.owners_of(written))
        return WatchedUse(func, tensors, versions, before)

    def remember(self, parameters: Sequence[BoundParameter]) -> dict[str, Tensor]:
        """Copies of the elements of those parameters of which more is kept than they show, by name: 1-D, in slot order."""
        with torch.inference_mode(False), torch.no_grad(), Plain():
            return {bound.name: self._elements(bound).clone() for bound in parameters if self._keeps_more(bound)}

    def _keeps_more(self, bound: BoundParameter) -> bool:
        """Tells whether a parameter's master is split, and the parameter shows the upper half itself."""
        return self.to_master is not None and not bound.is_copied and self.touches.keeps_rest(bound.name)

    def tell(self, watched: WatchedUse) -> None:
        """Tells of what a use has changed, once it has run.

        Raises:
            UnseenChangeError: nothing told that the use would change a parameter of which more is kept than it shows.
        """
        changed = self._changed(watched)
        if not changed:
            return
        if backward_id() != -1:
            for bound in with_tiles(self.access.records, changed):
                self.access.recomputed[id(bound.parameter)] = bound.parameter._version
        with ExitStack() as told:  # all of them, whatever becomes of one
            for bound in reversed(changed.values()):
                told.callback(self._carry, bound, watched)
            for key in reversed(dict.fromkeys(bound.key for bound in changed.values())):
                told.callback(self.access.owner.changed, key)

    def _changed(self, watched: WatchedUse) -> dict[str, BoundParameter]:
        """The parameters that a use has changed, by name. For one in tiles, what autograd saved of the tiles is out of date too."""
        grown = [
            tensor
            for tensor, version in zip(watched.tensors, watched.versions, strict=True)
            if version == _CHANGES or (NOT_COUNTED if tensor.is_inference() else tensor._version) != version
        ]
        changed = {bound.name: bound for bound in self.owners_of(grown)} if grown else {}
        for key in self.access.keys_of(grown):
            if isinstance(key, AssembledKey):  # a view of a gradient, or of the optimizer's state
                self.access.owner.assembled_changed(key, wholly=False)
        tiles = [tile.parameter for bound in changed.values() for tile in bound.tiles]
        if tiles:
            torch.autograd.graph.increment_version(tiles)
        return changed

    def _carry(self, bound: BoundParameter, watched: WatchedUse) -> None:
        if self.to_master is None or not self._keeps_more(bound):
            return
        before = watched.before.get(bound.name)
        self.to_master(bound, before)
        if before is None:
            raise UnseenChangeError(
                f"{getattr(watched.what, '__name__', watched.what)}() changed {bound.name} in place, and nothing told before that it would: "
                "which of its elements keep their fp32 master cannot be known, and all of them count as changed. Change it by an operation whose "
                "name tells (`with torch.no_grad(): weight.clamp_(-1, 1)`), declare what an operation of your own writes "
                '(torch.library.custom_op(mutates_args=)), or manage with Options(compute="fp32") or precision="fp32"'
            )

    def follow(self, parameters: Iterable[BoundParameter]) -> None:
        """Remembers parameters that keep their bytes as they are now, as far as more is kept of them than they show."""
        parameters = list(parameters)
        self.followed.update(self.remember(parameters))
        self.followed.update((bound.name, None) for bound in parameters if bound.is_copied)

    def look(self, bound: BoundParameter) -> None:
        """Carries a change of a parameter that keeps its bytes to where more is kept of it."""
        if bound.name not in self.followed:
            return
        with self.access.lock, Plain(), torch.no_grad():
            before = self.followed[bound.name]
            if before is None:
                self.access.owner.changed(bound.key)
            elif self.carry_changed(bound, before):
                before.copy_(self._elements(bound))

    def carry_changed(self, bound: BoundParameter, before: Tensor) -> bool:
        """Carries elements that are not as before of a parameter whose bytes are there to where more is kept of it; tells whether some are not."""
        with Plain(), torch.no_grad():
            if torch.equal(self._elements(bound).view(torch.int16), before.view(torch.int16)):
                return False
        assert self.to_master is not None
        self.to_master(bound, before)
        return True

    def _elements(self, bound: BoundParameter) -> Tensor:
        """The elements of a parameter whose bytes are there: 1-D, in slot order."""
        return self.access.lease(bound.key)[bound.offset : bound.offset + bound.shape_only.numel()]

    def outdate(self, names: Iterable[str]) -> None:
        """Raises the versions of parameters whose values change: what autograd saved of them before is out of date."""
        with Plain():
            torch.autograd.graph.increment_version([bound.tensor() for bound in with_tiles(self.access.records, names)])

    def renew(self, names: Iterable[str]) -> None:
        """Carries changed values of parameters to copies that somebody still holds, and raises their versions."""
        names = list(names)
        self.outdate(names)
        living = self.access.leases.living()
        for bound in with_tiles(self.access.records, names) if living else ():
            if bound.name in living:
                self.access.owner.renew(bound.name, self.access.lease(bound.name))
        for name in names if self.followed else ():
            before = self.followed.get(name)
            if before is not None:
                before.copy_(self._elements(self.access.records[name]))
        self.access.owner.updated()

    def is_shown(self, name: str) -> bool:
        """Tells whether somebody holds a copy of a parameter, or of a tile, or state of it that was put together."""
        living = self.access.leases.living()
        names = {bound.name for bound in with_tiles(self.access.records, [name])}
        shown = (key for key in living if not isinstance(key, PlaneRef))
        return any((key.name if isinstance(key, AssembledKey) else key) in names for key in shown)

    def stepped(self, names: Iterable[str]) -> None:
        """Tells whoever holds copies or state of parameters, or tiles, that an update has changed all of it."""
        names = list(names)
        self.renew(names)
        owners = {self.access.records[name].owner for name in names}
        for key in list(self.assembled.tensors):
            if key.plane in (EXP_AVG, EXP_AVG_SQ, STEP) and key.name in owners:
                self.assembled.changed(key)


@dataclass(eq=False)
class EscapedMemory:
    """The watch over memory that has been handed out, by digests, compared before anything moves.

    A unit is watched while its memory can be reached: as long as somebody has a lease on it, and until the check that follows. The owner is told
    of a unit or copy whose bytes are not what they were; changed elements are carried to where more is kept of a parameter than it shows.
    """

    access: WeightAccess
    changes: Changes
    watched: dict[WeightKey, tuple[bytes, dict[str, Tensor]]] = field(default_factory=dict, init=False)
    _kept: list[Tensor] = field(default_factory=list, init=False)

    def add(self, ref: WeightKey) -> None:
        """Begins to watch a unit, or a copy, whose memory has been handed out."""
        lease = self.access.lease(ref)
        if ref not in self.watched:
            self._remember(ref, _digest(lease))
        self._kept.append(lease)

    def renew(self) -> None:
        """Takes what is in memory now for what it should be: the library itself has written parameters."""
        for ref in self.watched:
            self._remember(ref, _digest(self.access.lease(ref)))

    def check(self) -> None:
        """Tells of what has changed, and stops watching what can no longer be reached. Called before a moment."""
        for ref, (digest, values) in self.watched.items():
            now = _digest(self.access.lease(ref))
            if now != digest:
                self.watched[ref] = now, values
                self.access.owner.changed(ref)
                for name, before in self.watched[ref][1].items():
                    self.changes.carry_changed(self.access.records[name], before)
                self._remember(ref, now)
        self._kept.clear()
        held = self.access.leases.living()
        for ref in [ref for ref in self.watched if ref not in held]:
            del self.watched[ref]
        # What is written and let go before the next check is still there then.
        self._kept = [self.access.lease(ref) for ref in self.watched]

    def _remember(self, ref: WeightKey, digest: bytes) -> None:
        self.watched[ref] = digest, self.changes.remember(self.access.parameters_in(ref))


def _digest(unit: Tensor) -> bytes:
    return hashlib.blake2b(unit.view(torch.uint8).numpy().data, digest_size=16).digest()
