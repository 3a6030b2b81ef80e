"""Escapes: memory of weights that has been handed out to code that can write to it unseen (`numpy()`, DLPack, `data_ptr()`)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from patrickstar.memory.leases import WeightKey
from patrickstar.parameters.changes import Changes
from patrickstar.parameters.weight_access import WeightAccess


@dataclass(eq=False)
class EscapedMemory:
    """The watch over memory that has been handed out, by digests, compared before anything moves.

    A unit is watched while its memory can be reached: as long as somebody has a lease on it, and until the check that follows.

    Attributes:
        access: has the memory, and the owner, who is told of a unit or copy whose bytes are not what they were.
        changes: remembers the elements of parameters of which more is kept than they show, and carries those that have changed.
    """

    access: WeightAccess
    changes: Changes
    watched: dict[WeightKey, bytes] = field(default_factory=dict, init=False)
    _values: dict[WeightKey, dict[str, Tensor]] = field(default_factory=dict, init=False)
    _kept: list[Tensor] = field(default_factory=list, init=False)

    def add(self, ref: WeightKey) -> None:
        """Begins to watch a unit, or a copy, whose memory has been handed out."""
        lease = self.access.lease(ref)
        if ref not in self.watched:
            self.watched[ref] = _digest(lease)
            self._values[ref] = self._remembered(ref)
        self._kept.append(lease)

    def renew(self) -> None:
        """Takes what is in memory now for what it should be: the library itself has written parameters."""
        for ref in self.watched:
            self.watched[ref] = _digest(self.access.lease(ref))
            self._values[ref] = self._remembered(ref)

    def check(self) -> None:
        """Tells of what has changed, and stops watching what can no longer be reached. Called before a moment."""
        for ref, digest in self.watched.items():
            now = _digest(self.access.lease(ref))
            if now != digest:
                self.watched[ref] = now
                self.access.owner.changed(ref)
                for name, values in self._values[ref].items():
                    self.changes.carry_changed(self.access.records[name], values)
                self._values[ref] = self._remembered(ref)
        self._kept.clear()
        held = self.access.leases.living()
        for ref in [ref for ref in self.watched if ref not in held]:
            del self.watched[ref], self._values[ref]
        # What is written and let go before the next check is still there then.
        self._kept = [self.access.lease(ref) for ref in self.watched]

    def _remembered(self, ref: WeightKey) -> dict[str, Tensor]:
        return self.changes.remember(self.access.parameters_in(ref))


def _digest(unit: Tensor) -> bytes:
    return hashlib.blake2b(unit.view(torch.uint8).numpy().data, digest_size=16).digest()
