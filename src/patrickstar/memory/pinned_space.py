"""Memory of the host that a device copies by itself: registered with the driver unit by unit, as these are first used.

Of exact size: torch's allocator of pinned memory would round up to powers of two.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Collection
from contextlib import suppress

import torch

from patrickstar.memory.space import HostSpace

_log = logging.getLogger("patrickstar")

_FOR_ALL_CONTEXTS = 1  # cudaHostRegisterPortable


class PinnedSpace(HostSpace):
    """Private anonymous memory of this process whose units are pinned while they are in use.

    Where the system refuses to pin, a warning says so once, and memory stays pageable: every copy then goes through the driver's own buffer, and
    the host waits for it.

    Attributes:
        pinned_bytes: what is pinned now.
    """

    def __init__(self, nbytes: int, *, unit_bytes: int, name: str) -> None:
        super().__init__(nbytes, unit_bytes=unit_bytes, name=name)
        self._pinned = set[int]()  # addresses
        self._refused = False
        # Before the memory goes, also where nobody closes the session.
        weakref.finalize(self, _unpin, self._pinned, os.getpid()).atexit = False

    @property
    def pinned_bytes(self) -> int:
        return len(self._pinned) * self._unit_bytes

    def prepare(self, at: int, nbytes: int) -> None:
        super().prepare(at, nbytes)
        if self._refused:
            return
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(self._start + at, nbytes, _FOR_ALL_CONTEXTS)
        if int(error) == int(runtime.cudaError.success):
            self._pinned.add(self._start + at)
            return
        self._refused = True
        _take_last_error()
        _log.warning(
            "the system pins no more than %d bytes of the host's memory (error %d of cudaHostRegister): the rest stays pageable, and copies of it "
            "take two to three times as long and keep the host waiting. Containers and WSL bound pinned memory; so does `ulimit -l`.",
            self.pinned_bytes,
            int(error),
        )

    def discard(self, at: int, nbytes: int) -> bool:
        if os.getpid() == self._owner:
            units = {self._start + unit for unit in range(at, at + nbytes, self._unit_bytes)}
            _unpin(units & self._pinned, self._owner)
            self._pinned -= units
        super().discard(at, nbytes)
        return True

    def close(self, kept: Collection[torch.UntypedStorage] = ()) -> None:
        _unpin(self._pinned, self._owner)  # what is still used stays memory, and is pageable from now on
        self._pinned.clear()
        super().close(kept)


def _take_last_error() -> None:
    """Takes the error that a refusal has left to the runtime: the next kernel that torch launches would raise it, wherever that is.

    torch clears it as it raises it, and has no other call that does.
    """
    with suppress(torch.AcceleratorError, torch.OutOfMemoryError):
        torch.empty(1, device="cuda").fill_(0)


def _unpin(addresses: set[int], owner: int) -> None:
    if os.getpid() == owner:
        for address in sorted(addresses):
            torch.cuda.cudart().cudaHostUnregister(address)
