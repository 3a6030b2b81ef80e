"""Weights whose memory has been handed out to code that can write to it unseen (`numpy()`, DLPack, `data_ptr()`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from patrickstar.memory.leases import Key, WeightKey

__all__ = ["EscapedMemory"]


class EscapedMemory:
    """Compares digests of what has been handed out, before anything moves.

    A unit is watched while its memory can be reached: as long as somebody has a lease on it, and until the check that follows.

    Args:
        lease: a tensor over the resident unit or the copy that keeps it where it is. held: those of which there is one.
        changed: is told of those whose bytes are not what they were.
        before: the elements of parameters in it of which more is kept than they show, by name. after: is given those of each that may have changed.
    """

    def __init__(
        self,
        lease: Callable[[WeightKey], Tensor],
        held: Callable[[], Collection[Key]],
        changed: Callable[[WeightKey], None],
        *,
        before: Callable[[WeightKey], dict[str, Tensor]] = lambda _: {},
        after: Callable[[str, Tensor], None] = lambda *_: None,
    ) -> None:
        self._lease = lease
        self._held = held
        self._changed = changed
        self._before = before
        self._after = after

        self._values: dict[WeightKey, dict[str, Tensor]] = {}
        self.watched: dict[WeightKey, bytes] = {}
        self._kept: list[Tensor] = []

    def add(self, ref: WeightKey) -> None:
        """The unit's memory has been handed out."""
        lease = self._lease(ref)
        if ref not in self.watched:
            self.watched[ref] = _digest(lease)
            self._values[ref] = self._before(ref)
        self._kept.append(lease)

    def renew(self) -> None:
        """The library itself has written parameters: what is in memory now is what it should be."""
        for ref in self.watched:
            self.watched[ref] = _digest(self._lease(ref))
            self._values[ref] = self._before(ref)

    def check(self) -> None:
        """Before a moment: says what has changed, and stops watching what can no longer be reached."""
        for ref, digest in self.watched.items():
            now = _digest(self._lease(ref))
            if now != digest:
                self.watched[ref] = now
                self._changed(ref)
                for name, values in self._values[ref].items():
                    self._after(name, values)
                self._values[ref] = self._before(ref)
        self._kept.clear()
        held = self._held()
        for ref in [ref for ref in self.watched if ref not in held]:
            del self.watched[ref], self._values[ref]
        # What is written and let go before the next check is still there then.
        self._kept = [self._lease(ref) for ref in self.watched]


def _digest(unit: Tensor) -> bytes:
    return hashlib.blake2b(unit.view(torch.uint8).numpy().data, digest_size=16).digest()
