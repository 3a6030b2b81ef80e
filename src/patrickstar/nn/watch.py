"""Weights whose memory has been handed out to code that can write to it unseen (`numpy()`, DLPack, `data_ptr()`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection

from torch import Tensor

from patrickstar.core.plane import PlaneRef

__all__ = ["Watch"]


class Watch:
    """Compares digests of what has been handed out, before anything moves.

    A unit is watched while its memory can be reached: as long as a lease on it lives, and at least until the next moment.

    Args:
        lease: a tensor over the resident unit that keeps it where it is. held: the units that may not move.
        changed: is told of units whose bytes are not what they were.
    """

    def __init__(
        self,
        lease: Callable[[PlaneRef], Tensor],
        held: Callable[[], Collection[PlaneRef]],
        changed: Callable[[PlaneRef], None],
    ) -> None:
        self._lease = lease
        self._held = held
        self._changed = changed

        self._digests: dict[PlaneRef, bytes] = {}
        self._kept: list[Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._digests)

    def add(self, ref: PlaneRef) -> None:
        """The unit's memory has been handed out."""
        lease = self._lease(ref)
        self._digests.setdefault(ref, _digest(lease))
        self._kept.append(lease)

    def check(self) -> None:
        """Before a moment: says what has changed, and stops watching what can no longer be reached."""
        for ref, digest in self._digests.items():
            now = _digest(self._lease(ref))
            if now != digest:
                self._digests[ref] = now
                self._changed(ref)
        self._kept.clear()
        held = self._held()
        for ref in [ref for ref in self._digests if ref not in held]:
            del self._digests[ref]


def _digest(unit: Tensor) -> bytes:
    return hashlib.blake2b(unit.numpy().data, digest_size=16).digest()
