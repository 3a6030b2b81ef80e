"""The process's memory allocator: which one serves torch's tensors, what it keeps of what is freed, how to get it back.

Freed activations stay with the allocator, and a budget is kept by what the process really holds. The figures of this file
come from `benchmarks/allocators.py`; decision record 0002 has the table and says what follows from it.
"""

from __future__ import annotations

import ctypes
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from patrickstar.units import KIB, MIB

__all__ = ["Allocator", "allocator", "identify", "release_free_memory", "set_glibc_thresholds", "tcmalloc_library"]

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_THRESHOLD_BYTES: Final = 128 * KIB

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

    Growth of the resident size stays within `live * retains + extra_bytes`, where `live` is the largest sum of live
    tensor bytes, and `extra_bytes` what a first step leaves behind whatever its size: lazy imports, thread pools,
    workspaces. Where `release_free_memory` is called whenever the resident size plus the coming rise of the live bytes
    would pass a limit, `retains` is 1 for every allocator.
    """

    name: str
    """`"glibc"`, `"tcmalloc"`, `"jemalloc"`, `"mimalloc"` or `"unknown"`."""
    library: str
    """The file that serves allocations; "" where it could not be found."""
    retains: float
    extra_bytes: int
    note: str
    """What would make it keep less, for people."""


def allocator(*, thresholds: bool = False) -> Allocator:
    """The allocator of this process: the library that the dynamic linker binds torch's allocation call to.

    Args:
        thresholds: `set_glibc_thresholds` was called.

    A library that is merely mapped does not count. Does not see an allocator linked into torch itself.
    """
    with Path("/proc/self/maps").open() as maps:
        name, library = identify(maps, address=ctypes.cast(_process.posix_memalign, ctypes.c_void_p).value or 0)
    if name == "glibc" and thresholds:
        retains, extra_bytes, note = _EXPECTED["glibc with thresholds"]
    else:
        retains, extra_bytes, note = _EXPECTED[name]
    return Allocator(name, library, retains, extra_bytes, note)


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


def set_glibc_thresholds() -> bool:
    """Make glibc give back every block of 128 KiB or more when it is freed; whether it now does.

    For the whole process and for good: setting a threshold ends glibc's own adaptation of it. False on any other
    allocator, which is left alone. What the heap has free already is still filled first, and kept when freed again:
    a process that has worked before needs `release_free_memory` as well.
    """
    if allocator().name != "glibc":
        return False
    options = ((_M_MMAP_THRESHOLD, _THRESHOLD_BYTES), (_M_TRIM_THRESHOLD, _THRESHOLD_BYTES), (_M_TOP_PAD, 0))
    taken = [_process.mallopt(option, value) == 1 for option, value in options]
    return all(taken)


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


# Provisional.
_EXPECTED: Final = {
    "glibc": (1.7, 64 * MIB, "preloading tcmalloc (Debian: libtcmalloc-minimal4) or setting glibc's thresholds"),
    "glibc with thresholds": (1.0, 64 * MIB, ""),
    "tcmalloc": (1.6, 64 * MIB, ""),
    "jemalloc": (1.2, 64 * MIB, ""),
    "mimalloc": (1.7, 64 * MIB, ""),
    "unknown": (2.0, 64 * MIB, ""),
}
