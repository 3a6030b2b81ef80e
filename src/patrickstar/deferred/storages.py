"""Storages that are recorded while modules are built, and those without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from patrickstar.deferred.operations import is_plain
from patrickstar.deferred.recipe import Call, Cell, Operand, over
from patrickstar.memory.mapping import reserve

_FIRST_LOOK = 1024


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
        kept = {key: known for key, known in self._cells.items() if known[1].deferred and not known[0].expired()}
        self._cells = kept


def operand(tensor: Tensor, cell: Cell, after: Call | None) -> Operand:
    """A tensor as a view of its storage."""
    return Operand(cell, after, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
