"""Spaces: memory of one kind, addressed by offsets. What a tier's slots lie in."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from patrickstar.errors import StateError
from patrickstar.memory.mapping import HUGE_PAGE_BYTES, absent_bytes, advise_huge, discard, inherit, reserve

_Memory = TypeVar("_Memory")


class Space(Protocol):
    """Memory whose addresses are reserved, and whose pages come with their first use. What has a body here holds for most kinds."""

    def expect_open(self) -> object:
        """The memory itself. Raises StateError where it cannot be used: it has been let go of, or belongs to another process."""

    def buffer(self, at: int, nbytes: int) -> memoryview:
        """Bytes as the system's calls for files take them."""

    def wrapping(self, at: int, nbytes: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        """A function that gives these bytes as a flat tensor over a fresh storage, whose death tells that nothing made from it is left."""

    def fill(self, at: int, nbytes: int, byte: int) -> None:
        """Writes one byte everywhere. A work of a lane."""

    def copy_from(self, other: Space, from_: int, at: int, nbytes: int) -> None:
        """Copies bytes of another space. A work of a lane."""

    def tensor(self, at: int, nbytes: int) -> Tensor:
        """A tensor of these bytes, for a copy."""
        return self.wrapping(at, nbytes, torch.uint8)()

    def prepare(self, at: int, nbytes: int) -> None:
        """Is told of a slot that is used for the first time, or again after `discard` has asked for that. DeviceError: there is no memory."""

    def discard(self, at: int, nbytes: int) -> bool:
        """Gives the memory of slots back to the system, or keeps it; tells whether they have to be prepared again. Nothing uses them."""

    def can_lend(self) -> bool:
        """Tells whether the memory of one slot can be another's as well."""
        return False

    def lend(self, at: int, to: int) -> None:
        """Gives the memory of a slot that is prepared to another one as well, which then is: both read and write the same bytes until `discard`."""
        raise NotImplementedError

    def inherit(self, at: int, nbytes: int, *, inherited: bool) -> None:
        """Has forked children inherit the memory of slots, or no more. None inherits that of a device."""

    def absent_bytes(self, at: int, nbytes: int) -> int:
        """Bytes of a range of whole pages that have none yet."""

    def close(self, kept: Collection[torch.UntypedStorage] = ()) -> None:
        """Lets go of the memory: it goes with the last tensor or buffer over it. `kept`: those that a tensor is still over."""


class HostSpace(Space):
    """Private anonymous memory of this process. `unit_bytes`: of a slot."""

    def __init__(self, nbytes: int, *, unit_bytes: int, name: str) -> None:
        self.name = name
        self._unit_bytes = unit_bytes
        self._owner = os.getpid()

        self._memory: ctypes.Array[ctypes.c_char] | None = reserve(nbytes)
        self._start = ctypes.addressof(self._memory)

    def buffer(self, at: int, nbytes: int) -> memoryview:
        return memoryview(self.expect_open()).cast("B")[at : at + nbytes]

    def wrapping(self, at: int, nbytes: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        # 1 microsecond a call. Not to be called in inference mode: what is made there could neither be saved for backward nor written later.
        return partial(torch.frombuffer, self.expect_open(), dtype=dtype, count=nbytes // dtype.itemsize, offset=at)

    def fill(self, at: int, nbytes: int, byte: int) -> None:
        if self._memory is not None:
            ctypes.memset(self._start + at, byte, nbytes)

    def copy_from(self, other: Space, from_: int, at: int, nbytes: int) -> None:
        self.expect_open()
        if isinstance(other, HostSpace):
            ctypes.memmove(self._start + at, other._start + from_, nbytes)
        else:
            copy_by_unit(other, from_, self, at, nbytes, unit_bytes=self._unit_bytes)

    def prepare(self, at: int, nbytes: int) -> None:
        if nbytes >= HUGE_PAGE_BYTES:
            advise_huge(self._start + at, nbytes)

    def discard(self, at: int, nbytes: int) -> bool:
        if os.getpid() == self._owner:
            discard(self._start + at, nbytes)
        return False

    def inherit(self, at: int, nbytes: int, *, inherited: bool) -> None:
        inherit(self._start + at, nbytes, inherited=inherited)

    def absent_bytes(self, at: int, nbytes: int) -> int:
        return absent_bytes(self._start + at, nbytes)

    def close(self, kept: Collection[torch.UntypedStorage] = ()) -> None:  # noqa: ARG002
        self._memory = None

    def expect_open(self) -> ctypes.Array[ctypes.c_char]:
        memory = self._memory
        if memory is not None and os.getpid() == self._owner:  # without another call: each transfer asks
            return memory
        return still_open(memory, name=self.name, owner=self._owner)


def still_open(memory: _Memory | None, *, name: str, owner: int, forked: str = "") -> _Memory:
    """The memory of an arena. StateError: it has been let go of, or belongs to another process. `forked`: what is said of that as well."""
    if memory is None:
        raise StateError(f"the {name} arena is closed")
    if os.getpid() != owner:
        raise StateError(
            f"the {name} arena belongs to process {owner}, and this one was forked from it{forked}: "
            "use the model in the process that manages it, or start workers with the spawn method"
        )
    return memory


def copy_by_unit(source: Space, from_: int, target: Space, at: int, nbytes: int, *, unit_bytes: int) -> None:
    """Copies bytes from or to a device, on the current stream: unit by unit, as memory of the host is pinned."""
    for offset in range(0, nbytes, unit_bytes):
        unit = source.tensor(from_ + offset, unit_bytes)
        target.tensor(at + offset, unit_bytes).copy_(unit, non_blocking=True)


_log = logging.getLogger("patrickstar")

_FOR_ALL_CONTEXTS = 1  # cudaHostRegisterPortable


class PinnedSpace(HostSpace):
    """Private anonymous memory of this process, which a device copies by itself: each unit is registered with the driver when it is first used.

    Of exact size: torch's allocator of pinned memory would round up to powers of two. Where the system refuses to pin, a warning says so once, and
    memory stays pageable: every copy then goes through the driver's own buffer, and the host waits for it.

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
