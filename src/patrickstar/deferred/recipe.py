"""Recipes of tensors' values: the storages that are recorded, and the operations that made and changed them, to be carried out again.

Note [Recipes]
    Operations are recorded by *storage*, since initialisers write through views (`weight[padding_idx].zero_()`, `weight.data`). Each call
    knows, for each storage it read, the call that wrote it last: so what a storage needs is found by walking back, and carrying those calls
    out in the order in which they were recorded gives the same bytes. Whoever draws random numbers has the generator's state with it, so one
    storage is made again without drawing the numbers of the others. A call that overwrites a storage whole begins a new walk: what was
    written before, and overwritten, is let go at once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree

from patrickstar.core.strides import dense_strides
from patrickstar.memory.mapping import reserve
from patrickstar.units import KIB

_OWN_MAPPING_BYTES = 64 * KIB
_FIRST_LOOK = 1024


@dataclass(eq=False, slots=True)
class Cell:
    """A storage, as long as it is recorded.

    Attributes:
        nbytes: its size. last: the call that made or wrote it last; None: it has no contents.
        deferred: whether it has no memory, as a parameter's. label: how messages call it, once a module has it.
    """

    nbytes: int
    last: Call | None = None
    deferred: bool = False
    label: str = ""


class Operand(NamedTuple):
    """A view of a storage as a call was given it; `after`: the call that wrote the storage last then, None where no contents are needed."""

    cell: Cell
    after: Call | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(eq=False, slots=True)
class Call:
    """One operation, as it was called.

    Attributes:
        number: in the order of recording. leaves, spec: the arguments, flat: operands, and copies of generators and of small tensors that no recorded
            call has made.
        random_state: of torch's own generator before it, where it draws from that.
        makes: the new storages among what it returned, by place. lost: why it cannot be carried out again, or "".
        parameters: the parameters whose values it depends on.
    """

    number: int
    func: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: Any
    random_state: Tensor | None = None
    makes: list[tuple[int, Cell]] = field(default_factory=list)
    lost: str = ""
    parameters: frozenset[Cell] = frozenset()

    def operands(self) -> Iterable[Operand]:
        """The arguments of the call that are recorded storages."""
        return (leaf for leaf in self.leaves if isinstance(leaf, Operand))


class Storages:
    """Records of storages, found by storage."""

    def __init__(self) -> None:
        # A weak reference to a storage keeps its address from being given to another.
        self._cells: dict[int, tuple[StorageWeakRef, Cell]] = {}
        self._look_again = _FIRST_LOOK
        self._space: Any = None

    def cell(self, tensor: Tensor) -> Cell | None:
        """The record of a tensor's storage; None: it was not made while we looked."""
        if not is_plain(tensor):
            return None
        known = self._cells.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def add(self, storage: torch.UntypedStorage, cell: Cell) -> None:
        """Notes the record of a storage. Several storages may have one record."""
        if len(self._cells) >= self._look_again:
            self._cells = {key: known for key, known in self._cells.items() if not known[0].expired()}
            self._look_again = _FIRST_LOOK + 2 * len(self._cells)
        self._cells[storage._cdata] = (StorageWeakRef(storage), cell)

    def without_memory(self, cell: Cell, like: Tensor) -> Tensor:
        """A tensor of this shape and strides, over address space that all share, as nothing is ever there."""
        if self._space is None or len(self._space) < cell.nbytes:
            self._space = reserve(2 * cell.nbytes)
        flat = torch.empty(0, dtype=torch.uint8)
        if cell.nbytes:
            flat = torch.frombuffer(self._space, dtype=torch.uint8, count=cell.nbytes)
        self.add(flat.untyped_storage(), cell)
        return over(flat.untyped_storage(), operand(like, cell, None))

    def keep_deferred(self) -> None:
        """Forgets what has memory of its own."""
        self._cells = {key: one for key, one in self._cells.items() if one[1].deferred and not one[0].expired()}


def is_plain(tensor: Tensor) -> bool:
    """Tells whether a tensor has elements in a storage in memory."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not isinstance(tensor, FakeTensor)
        and not torch.nn.parameter.is_lazy(tensor)
    )


def is_dense(tensor: Tensor) -> bool:
    """Tells whether a tensor's elements lie without gaps or overlaps."""
    return dense_strides(tensor.shape, tensor.stride()) == tensor.stride()


def operand(tensor: Tensor, cell: Cell, after: Call | None) -> Operand:
    """A tensor as a view of its storage."""
    return Operand(cell, after, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


def over(storage: torch.UntypedStorage, operand: Operand) -> Tensor:
    """The operand's view of a storage."""
    return torch.empty(0, dtype=operand.dtype).set_(storage, operand.offset, operand.shape, operand.stride)


def room(nbytes: int) -> torch.UntypedStorage:
    """Memory for a whole tensor that goes back to the system with it.

    Freed blocks of the heap would not: small tensors that stay (random states) settle in them, and the next parameter needs another.
    """
    if nbytes < _OWN_MAPPING_BYTES:
        return torch.UntypedStorage(nbytes)
    return torch.frombuffer(reserve(nbytes), dtype=torch.uint8, count=nbytes).untyped_storage()


def can_replay_in(cell: Cell, dtype: torch.dtype) -> bool:
    """Tells whether every call that a storage needs only writes to it, as this type: then it can be made where it is to lie."""
    return all(
        not call.makes and all(operand.cell is cell and operand.dtype is dtype for operand in call.operands())
        for call in _needed(cell)
    )


def replay(cell: Cell, place: Tensor | None = None) -> torch.UntypedStorage:
    """The contents of a storage, made again. Torch's random state is afterwards as before. Modes and gradients must be off.

    `place`: a 1-D tensor of the storage's size, in which they are made. Only where `can_replay_in`.
    """
    calls = _needed(cell)
    uses = Counter(id(operand.cell) for call in calls for operand in call.operands())
    storages: dict[int, torch.UntypedStorage] = {}
    with torch.random.fork_rng(devices=[]):
        for call in calls:
            _carry_out(call, storages, place)
            for operand in call.operands():
                uses[id(operand.cell)] -= 1
                if not uses[id(operand.cell)] and operand.cell is not cell:
                    storages.pop(id(operand.cell), None)  # nothing needs it any more
    if place is not None:
        return place.untyped_storage()
    return storages[id(cell)] if id(cell) in storages else room(cell.nbytes)


def digest(cell: Cell) -> bytes:
    """The digest of what makes the contents of a storage: alike, where these will be."""
    found = hashlib.sha256()
    for call in _needed(cell):
        for leaf in (call.func, *call.leaves, call.random_state):
            match leaf:
                case torch.Generator():
                    found.update(leaf.get_state().numpy().data)
                case Tensor():
                    found.update(leaf.contiguous().view(-1).view(torch.uint8).numpy().data)
                case Operand():
                    found.update(str((leaf.shape, leaf.stride, leaf.offset)).encode())
                case _:
                    found.update(str(leaf).encode())
    return found.digest()


def _needed(cell: Cell) -> list[Call]:
    found: dict[int, Call] = {}
    pending = [cell.last]
    while pending:
        call = pending.pop()
        if call is not None and id(call) not in found:
            found[id(call)] = call
            pending += [operand.after for operand in call.operands()]
    return sorted(found.values(), key=lambda call: call.number)


def _carry_out(call: Call, storages: dict[int, torch.UntypedStorage], place: Tensor | None) -> None:
    def real(leaf: Any) -> Any:
        match leaf:
            case Operand(cell=cell):
                if place is not None:
                    return place.as_strided(leaf.shape, leaf.stride, int(place.storage_offset()) + leaf.offset)
                if id(cell) not in storages:
                    storages[id(cell)] = room(cell.nbytes)
                return over(storages[id(cell)], leaf)
            case torch.Generator():
                return leaf.clone_state()
            case _:
                return leaf

    args, kwargs = _pytree.tree_unflatten([real(leaf) for leaf in call.leaves], call.spec)
    if call.random_state is not None:
        torch.set_rng_state(call.random_state)
    results = _pytree.tree_leaves(call.func(*args, **kwargs))
    for number, cell in call.makes:
        storages[id(cell)] = results[number].untyped_storage()
