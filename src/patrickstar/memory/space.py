"""Spaces: memory of one kind, addressed by offsets. What a tier's slots lie in."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from patrickstar.errors import StateError
from patrickstar.memory.driver import DeviceAddresses, granule_bytes
from patrickstar.memory.mapping import HUGE_PAGE_BYTES, absent_bytes, advise_huge, discard, inherit, reserve
from patrickstar.torch_private import storage_at

_Memory = TypeVar("_Memory")
_FOR_ALL_CONTEXTS = 1  # cudaHostRegisterPortable

_log = logging.getLogger("patrickstar")


class Space(Protocol):
    """Memory whose addresses are reserved, and whose pages come with their first use. What has a body here holds for most kinds.

    `_unit_bytes`: of a slot.
    """

    _unit_bytes: int

    def expect_open(self) -> object:
        """The memory itself. Raises StateError where it cannot be used: it has been let go of, or belongs to another process."""

    def buffer(self, at: int, nbytes: int) -> memoryview:
        """Bytes as the system's calls for files take them."""

    def wrapping(self, at: int, nbytes: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        """A function that gives these bytes as a flat tensor over a fresh storage, whose death tells that nothing made from it is left."""

    def fill(self, at: int, nbytes: int, byte: int) -> None:
        """Writes one byte everywhere. A work of a lane."""

    def copy_from(self, other: Space, from_: int, at: int, nbytes: int) -> None:
        """Copies bytes of another space, on the current stream: unit by unit, as memory of the host is pinned. A work of a lane."""
        unit_bytes = self._unit_bytes
        for offset in range(0, nbytes, unit_bytes):
            unit = other.tensor(from_ + offset, unit_bytes)
            self.tensor(at + offset, unit_bytes).copy_(unit, non_blocking=True)

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

    def inherit(self, at: int, nbytes: int, *, inherited: bool) -> None:  # noqa: ARG002
        """Has forked children inherit the memory of slots, or no more. None inherits that of a device."""
        return

    def absent_bytes(self, at: int, nbytes: int) -> int:
        """Bytes of a range of whole pages that have none yet."""

    def close(self, kept: Collection[torch.UntypedStorage] = ()) -> None:
        """Lets go of the memory: it goes with the last tensor or buffer over it. `kept`: those that a tensor is still over."""


class HostSpace(Space):
    """Private anonymous memory of this process."""

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
            super().copy_from(other, from_, at, nbytes)

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


class DeviceSpace(Space):
    """Memory of one CUDA device. What fills and copies is queued on the current stream.

    Units that are no multiple of what the driver maps at a time (2 MiB) share what they lie in: it is there while one of them is prepared.
    """

    def __init__(self, nbytes: int, *, unit_bytes: int, name: str, device: torch.device) -> None:
        self.name = name
        self._device = device
        self._unit_bytes = unit_bytes
        granule = granule_bytes(device.index or 0)
        self._piece_bytes = granule if unit_bytes % granule else unit_bytes
        self._owner = os.getpid()
        self._addresses: DeviceAddresses | None = DeviceAddresses(nbytes, device=device.index or 0)
        self._start = self._addresses.start
        self._prepared: Counter[int] = Counter()  # units, by piece
        self._copied: dict[tuple[int, int], Tensor] = {}

    def buffer(self, at: int, nbytes: int) -> memoryview:  # noqa: ARG002
        raise StateError(f"the {self.name} arena has no bytes that the host could see")

    def wrapping(self, at: int, nbytes: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        self.expect_open()
        address, size = self._start + at, (nbytes // dtype.itemsize,)
        empty = torch.empty(0, dtype=dtype, device=self._device)

        def wrap() -> Tensor:
            return empty.new_empty(0).set_(storage_at(address, nbytes, self._device), 0, size, (1,))

        return wrap

    def tensor(self, at: int, nbytes: int) -> Tensor:
        # Made once: a storage over an address takes the host as long as the launch of a copy.
        self.expect_open()
        if (at, nbytes) not in self._copied:
            with torch.inference_mode(False):
                self._copied[at, nbytes] = super().tensor(at, nbytes)
        return self._copied[at, nbytes]

    def fill(self, at: int, nbytes: int, byte: int) -> None:
        if self._addresses is not None:
            self.tensor(at, nbytes).fill_(byte)

    def prepare(self, at: int, nbytes: int) -> None:
        addresses, mapped = self.expect_open(), list[int]()
        pieces = self._pieces(at, nbytes)
        try:
            for piece in pieces:
                if not self._prepared[piece]:
                    addresses.map(piece, self._piece_bytes)
                    mapped.append(piece)
        except BaseException:
            for piece in mapped:
                addresses.unmap(piece)
            raise
        self._prepared.update(pieces)

    def discard(self, at: int, nbytes: int) -> bool:
        if os.getpid() == self._owner and self._addresses is not None:
            for unit in range(at, at + nbytes, self._unit_bytes):
                pieces = self._pieces(unit, self._unit_bytes)
                self._prepared.subtract(pieces)
                for piece in pieces:
                    if not self._prepared[piece]:
                        self._addresses.unmap(piece)
        return True

    def absent_bytes(self, at: int, nbytes: int) -> int:  # noqa: ARG002
        return 0

    def can_lend(self) -> bool:
        return self._piece_bytes == self._unit_bytes

    def lend(self, at: int, to: int) -> None:
        addresses = self.expect_open()
        addresses.map_also(to, at)
        self._prepared[to] += 1

    def close(self, kept: Collection[torch.UntypedStorage] = ()) -> None:
        addresses, self._addresses = self._addresses, None
        self._copied.clear()
        if addresses is None or os.getpid() != self._owner:
            return
        if not kept:
            addresses.close()
            return
        left = set(range(len(kept)))
        for number, storage in enumerate(kept):
            weakref.finalize(storage, _close_after, left, number, addresses, self._device).atexit = False

    def _pieces(self, at: int, nbytes: int) -> range:
        first = at // self._piece_bytes * self._piece_bytes
        return range(first, at + nbytes, self._piece_bytes)

    def expect_open(self) -> DeviceAddresses:
        forked = ", where CUDA cannot be used"
        return still_open(self._addresses, name=self.name, owner=self._owner, forked=forked)


def _close_after(left: set[int], number: int, addresses: DeviceAddresses, device: torch.device) -> None:
    """Gives the memory up with the last storage over it, when nothing that was queued uses that. `left`: numbers of those that are there."""
    left.discard(number)
    if not left:
        torch.accelerator.synchronize(device)
        addresses.close()
