"""Escapes: memory of weights that has been handed out to code that can write to it unseen (`numpy()`, DLPack, `data_ptr()`)."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from patrickstar.memory.leases import WeightKey
from patrickstar.parameters.changes import Changes
from patrickstar.parameters.weight_access import WeightAccess


class EscapedMemory:
    """The watch over memory that has been handed out, by digests, compared before anything moves.

    A unit is watched while its memory can be reached: as long as somebody has a lease on it, and until the check that follows.

    Args:
        access: has the memory, and the owner, who is told of a unit or copy whose bytes are not what they were.
        changes: remembers the elements of parameters of which more is kept than they show, and carries those that have changed.
    """

    def __init__(self, access: WeightAccess, changes: Changes) -> None:
        self._access = access
        self._changes = changes

        self._values: dict[WeightKey, dict[str, Tensor]] = {}
        self.watched: dict[WeightKey, bytes] = {}
        self._kept: list[Tensor] = []

    def add(self, ref: WeightKey) -> None:
        """Begins to watch a unit, or a copy, whose memory has been handed out."""
        lease = self._access.lease(ref)
        if ref not in self.watched:
            self.watched[ref] = _digest(lease)
            self._values[ref] = self._remembered(ref)
        self._kept.append(lease)

    def renew(self) -> None:
        """Takes what is in memory now for what it should be: the library itself has written parameters."""
        for ref in self.watched:
            self.watched[ref] = _digest(self._access.lease(ref))
            self._values[ref] = self._remembered(ref)

    def check(self) -> None:
        """Tells of what has changed, and stops watching what can no longer be reached. Called before a moment."""
        for ref, digest in self.watched.items():
            now = _digest(self._access.lease(ref))
            if now != digest:
                self.watched[ref] = now
                self._access.owner.changed(ref)
                for name, values in self._values[ref].items():
                    self._changes.carry_changed(self._access.records[name], values)
                self._values[ref] = self._remembered(ref)
        self._kept.clear()
        held = self._access.leases.living()
        for ref in [ref for ref in self.watched if ref not in held]:
            del self.watched[ref], self._values[ref]
        # What is written and let go before the next check is still there then.
        self._kept = [self._access.lease(ref) for ref in self.watched]

    def _remembered(self, ref: WeightKey) -> dict[str, Tensor]:
        return self._changes.remember(self._access.parameters_in(ref))


def _digest(unit: Tensor) -> bytes:
    return hashlib.blake2b(unit.view(torch.uint8).numpy().data, digest_size=16).digest()
