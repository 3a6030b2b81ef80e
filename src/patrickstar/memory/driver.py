"""Virtual memory of a CUDA device: addresses that are reserved once, and memory that is mapped at them and taken away again.

The driver's own functions (CUDA driver API, "Virtual Memory Management"), which torch does not expose, by ctypes.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from functools import cache, partial
from typing import Any, Final, NamedTuple

import torch

from patrickstar.errors import DeviceError
from patrickstar.units import format_bytes

_SUCCESS: Final = 0
_OUT_OF_MEMORY: Final = 2
_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_AND_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM: Final = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_LIBRARY: Final = "libcuda.so.1"


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise DeviceError(f"the driver's library {_LIBRARY} cannot be loaded: {error}") from None


def _call(name: str, *arguments: Any) -> int:
    try:
        function = getattr(_driver(), name)
    except AttributeError:
        raise DeviceError(f"the driver is too old: it has no {name}; CUDA 11.4 or later is needed") from None
    # Addresses, handles and sizes; of what is less wide a register's lower half is read.
    return int(function(*[ctypes.c_ulonglong(one) if isinstance(one, int) else one for one in arguments]))


def _expect(result: int, what: str) -> None:
    if result != _SUCCESS:
        text = ctypes.c_char_p()
        _call("cuGetErrorString", result, ctypes.byref(text))
        raise DeviceError(f"{what}: {(text.value or b'unknown error').decode()} (CUDA error {result})")


def _properties(device: int) -> Any:
    return ctypes.byref(_AllocationProperties(type=_PINNED, location=_Location(_ON_DEVICE, device)))


@cache
def granule_bytes(device: int) -> int:
    """Bytes that can be mapped at a time."""
    nbytes = ctypes.c_size_t()
    result = _call("cuMemGetAllocationGranularity", ctypes.byref(nbytes), _properties(device), _MINIMUM)
    _expect(result, "the device does not say how much memory it maps at a time")
    return nbytes.value


class _Memory(NamedTuple):
    """Memory of the device, which goes with the last place at which it is mapped."""

    handle: int
    nbytes: int


class DeviceAddresses:
    """A range of addresses of a device, at which memory is mapped piece by piece.

    Attributes:
        start: the first address. nbytes: of the range, whole granules.
    """

    def __init__(self, nbytes: int, *, device: int) -> None:
        granule = granule_bytes(device)
        self.nbytes = -(-nbytes // granule) * granule
        self._device = device
        self._pieces: dict[int, _Memory] = {}
        self._places: Counter[_Memory] = Counter()
        start = ctypes.c_ulonglong()
        result = _call("cuMemAddressReserve", ctypes.byref(start), self.nbytes, 0, 0, 0)
        _expect(result, f"no addresses of the device are left for {format_bytes(self.nbytes)}")
        self.start = start.value

    @property
    def mapped_bytes(self) -> int:
        """Bytes of memory, wherever it is mapped."""
        return sum(memory.nbytes for memory in self._places)

    def map(self, at: int, nbytes: int) -> None:
        """Gives memory to a piece that has none: whole granules, contents undefined.

        Where the device has no more, torch's allocator gives up what it keeps and nobody uses, for which the host waits.

        Raises:
            DeviceError: the device has no more.
        """
        handle = ctypes.c_ulonglong()
        create = partial(_call, "cuMemCreate", ctypes.byref(handle), nbytes, _properties(self._device), 0)
        result = create()
        if result == _OUT_OF_MEMORY:
            torch.accelerator.empty_cache()
            result = create()
        if result == _OUT_OF_MEMORY:
            raise DeviceError(self._no_memory(nbytes))
        _expect(result, f"{format_bytes(nbytes)} of the device cannot be taken")
        memory = _Memory(handle.value, nbytes)
        try:
            self._map(at, memory)
        finally:
            self._let_go(memory)

    def map_also(self, at: int, of: int) -> None:
        """Gives the memory of a piece to another one as well, which has none. Nothing is waited for: whoever asks orders what uses both."""
        self._map(at, self._pieces[of])

    def _map(self, at: int, memory: _Memory) -> None:
        mapped = _call("cuMemMap", self.start + at, memory.nbytes, 0, memory.handle, 0)
        _expect(mapped, "memory of the device cannot be mapped")
        self._pieces[at] = memory
        self._places[memory] += 1
        access = ctypes.byref(_Access(_Location(_ON_DEVICE, self._device), _READ_AND_WRITE))
        _expect(
            _call("cuMemSetAccess", self.start + at, memory.nbytes, access, 1), "memory of the device cannot be used"
        )

    def _let_go(self, memory: _Memory) -> None:
        if not self._places[memory]:
            del self._places[memory]
            _call("cuMemRelease", memory.handle)

    def _no_memory(self, nbytes: int) -> str:
        free, total = torch.accelerator.get_memory_info(self._device)
        allocated = torch.accelerator.memory_allocated(self._device)
        mine = self.mapped_bytes
        return (
            f"the device has no memory left for a slot of {format_bytes(nbytes)}: of {format_bytes(total)} {format_bytes(free)} are free, "
            f"this session's slots have {format_bytes(mine)}, torch's allocator has {format_bytes(allocated)} in use, and others "
            f"{format_bytes(max(0, total - free - mine - allocated))}. Give a smaller device_memory, or end other programs on the device"
        )

    def unmap(self, at: int) -> None:
        """Takes the memory of a piece away, which nothing on the device uses any more."""
        memory = self._pieces[at]
        _expect(_call("cuMemUnmap", self.start + at, memory.nbytes), "memory of the device cannot be given back")
        del self._pieces[at]
        self._places[memory] -= 1
        self._let_go(memory)

    def close(self) -> None:
        """Gives the addresses up, and the memory at them. Nothing on the device uses them any more."""
        for at in list(self._pieces):
            self.unmap(at)
        if self.nbytes:
            freed = _call("cuMemAddressFree", self.start, self.nbytes)
            _expect(freed, "addresses of the device cannot be given back")
            self.nbytes = 0
