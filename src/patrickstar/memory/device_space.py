"""Memory of a device at fixed addresses, taken from the driver slot by slot: slots and torch's own allocations cannot fragment each other."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from patrickstar.errors import StateError
from patrickstar.memory.driver import DeviceAddresses, granule_bytes
from patrickstar.memory.space import Space, copy_by_unit, still_open
from patrickstar.torch_private import storage_at


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

    def copy_from(self, other: Space, from_: int, at: int, nbytes: int) -> None:
        copy_by_unit(other, from_, self, at, nbytes, unit_bytes=self._unit_bytes)

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

    def can_lend(self) -> bool:
        return self._piece_bytes == self._unit_bytes

    def lend(self, at: int, to: int) -> None:
        addresses = self.expect_open()
        addresses.map_also(to, at)
        self._prepared[to] += 1

    def inherit(self, at: int, nbytes: int, *, inherited: bool) -> None:
        """None inherits memory of a device."""

    def absent_bytes(self, at: int, nbytes: int) -> int:  # noqa: ARG002
        return 0

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
