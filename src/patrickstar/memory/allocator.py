"""The process's memory allocator: which one serves torch's tensors, what it keeps of what is freed, how to get it back.

Figures are from `benchmarks/allocators.py`: `docs/decisions/0002-allocators.md`.
"""

from __future__ import annotations

import ctypes
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from patrickstar.units import GIB, KIB, MIB

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_THRESHOLD_BYTES: Final = 128 * KIB
_LARGEST_HOLE_BYTES: Final = GIB  # larger ones are filled by several blocks
_DECOMMIT: Final = b"tcmalloc.aggressive_memory_decommit"

# Preferred first: the minimal one lacks the profilers, which nobody asked for.
_TCMALLOC_FILES: Final = ("libtcmalloc_minimal.so.4", "libtcmalloc_minimal.so", "libtcmalloc.so.4", "libtcmalloc.so")
_MAP_LINE: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ +(/.*)")
_FILE_NAMES: Final = (
    ("tcmalloc", re.compile(r"libtcmalloc")),
    ("jemalloc", re.compile(r"libjemalloc")),
    ("mimalloc", re.compile(r"libmimalloc")),
    ("glibc", re.compile(r"libc[-.]")),
)

_process = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Allocator:
    """An allocator, and what to expect of it.

    The process grows by at most `live * retains + extra_bytes` over its size before, where `live` is the largest sum of
    live tensor bytes.
    """

    name: str
    """`"glibc"`, `"tcmalloc"`, `"jemalloc"`, `"mimalloc"` or `"unknown"`."""
    library: str
    """The file that serves allocations; "" where it could not be found."""
    retains: float
    extra_bytes: int
    """What a first step leaves behind whatever its size: lazy imports, thread pools, workspaces, pages of libraries."""
    overshoots: float
    """What it takes at most beyond what is live, as a share of that, where it is asked for what it keeps (`release_free_memory`) before each rise."""


def allocator(*, returning: bool = False) -> Allocator:
    """The allocator of this process: the library that the dynamic linker binds torch's allocation call to.

    Args:
        returning: expect of it what it does once `return_at_once` was called, where it can.

    A library that is merely mapped does not count. Does not see an allocator linked into torch itself.
    """
    with Path("/proc/self/maps").open() as maps:
        name, library = identify(maps, address=ctypes.cast(_process.posix_memalign, ctypes.c_void_p).value or 0)
    at_once = returning if name == "glibc" else name == "tcmalloc" and (_decommits() or (returning and _can_decommit()))
    retains = 1.0 if at_once else _RETAINS[name]
    return Allocator(name, library, retains, _EXTRA_BYTES, _OVERSHOOTS.get(name, 1.0))


def identify(maps: Iterable[str], *, address: int) -> tuple[str, str]:
    """Name and file of the allocator whose code lies at `address`, given the lines of a process's memory map."""
    for line in maps:
        found = _MAP_LINE.match(line)
        if found and int(found[1], 16) <= address < int(found[2], 16):
            library = found[3].rstrip("\n")
            for name, pattern in _FILE_NAMES:
                if pattern.match(library.rpartition("/")[2]):
                    return name, library
            return "unknown", library
    return "unknown", ""


def return_at_once() -> str:
    """Make the allocator give back every larger block when it is freed, in the whole process: what was done, for people; "" where nothing was."""
    if set_glibc_thresholds():
        fill_holes()
        return "glibc now returns freed blocks of 128 KiB and more"
    if not _decommits() and set_tcmalloc_decommit():
        return "tcmalloc now returns freed blocks (tcmalloc.aggressive_memory_decommit)"
    return ""


def set_glibc_thresholds() -> bool:
    """Make glibc give back every block of 128 KiB or more when it is freed, for good; whether it now does.

    What the heap has free already is still filled first, and kept when freed again: a process that has worked before needs `fill_holes` as well.
    """
    if allocator().name != "glibc":
        return False
    options = {_M_MMAP_THRESHOLD: _THRESHOLD_BYTES, _M_TRIM_THRESHOLD: _THRESHOLD_BYTES, _M_TOP_PAD: 0}
    return min(_process.mallopt(option, value) for option, value in options.items()) == 1


def fill_holes() -> int:
    """Take the larger free blocks of glibc's heap for good, so that what is allocated next has a mapping of its own: bytes of addresses taken.

    Nothing is written to them, so they stay addresses without memory, but for a page each. For the heap of the thread that calls. See
    `set_glibc_thresholds`, which must have been called: holes that are left would be filled before anything is mapped.
    """
    # Prototypes of our own: attributes of a library are shared.
    malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", _process))
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(("free", _process))
    heap_end = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t)(("sbrk", _process))
    release_free_memory()
    taken, nbytes = 0, _LARGEST_HOLE_BYTES
    while nbytes >= _THRESHOLD_BYTES:
        block = malloc(nbytes)
        if block is not None and block < heap_end(0):  # in the heap, which lies below everything that is mapped
            taken += nbytes
            continue
        free(block)
        nbytes //= 2
    return taken


def set_tcmalloc_decommit() -> bool:
    """Make tcmalloc give back every block when it is freed; whether it now does."""
    if allocator().name != "tcmalloc" or not _can_decommit():
        return False
    return bool(_process.MallocExtension_SetNumericProperty(_DECOMMIT, ctypes.c_size_t(1)))


def release_free_memory() -> None:
    """Have the allocator give back to the system what it keeps of freed memory. Milliseconds, and faults later on."""
    if hasattr(_process, "MallocExtension_ReleaseFreeMemory"):  # tcmalloc
        _process.MallocExtension_ReleaseFreeMemory()
    if hasattr(_process, "mallctl"):  # jemalloc; 4096 stands for all arenas
        _process.mallctl(b"arena.4096.purge", None, None, None, ctypes.c_size_t(0))
    if hasattr(_process, "mi_collect"):  # mimalloc
        _process.mi_collect(ctypes.c_bool(True))
    if hasattr(_process, "malloc_trim"):  # glibc, which other allocators leave some blocks to
        _process.malloc_trim(ctypes.c_size_t(0))


def tcmalloc_library(directories: Iterable[Path] | None = None) -> Path | None:
    """An installed tcmalloc to preload, or None. Must be in `LD_PRELOAD` before the process starts."""
    if directories is None:
        multiarch = sysconfig.get_config_var("MULTIARCH") or ""
        places = (Path(sys.prefix) / "lib", Path("/usr/local/lib"), Path("/usr/lib") / multiarch, Path("/usr/lib64"))
        directories = (*places, Path("/usr/lib"))
    for directory in directories:
        for file in _TCMALLOC_FILES:
            if (directory / file).is_file():
                return directory / file
    return None


def _can_decommit() -> bool:
    return hasattr(_process, "MallocExtension_SetNumericProperty")


def _decommits() -> bool:
    if not _can_decommit():
        return False
    value = ctypes.c_size_t(0)
    return bool(_process.MallocExtension_GetNumericProperty(_DECOMMIT, ctypes.byref(value)) and value.value)


# The most that was measured is 61 MiB: decision record 0002.
_EXTRA_BYTES: Final = 64 * MIB

# Measured were 0.08 and 0.19: the same record.
_OVERSHOOTS: Final = MappingProxyType({"glibc": 1 / 12, "tcmalloc": 1 / 4})

# Those of jemalloc and mimalloc are from a shorter series, under no session.
_RETAINS: Final = MappingProxyType({"glibc": 1.6, "tcmalloc": 1.45, "jemalloc": 1.2, "mimalloc": 1.7, "unknown": 2.0})
