"""Private anonymous memory that goes with the last reference to it: reserve, advise, discard."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any, Final

from patrickstar.errors import DeviceError
from patrickstar.units import format_bytes

PAGE_BYTES: Final = mmap.PAGESIZE
HUGE_PAGE_BYTES: Final = 2 << 20

_MADV_NOHUGEPAGE: Final = 15  # mmap exports this one from Python 3.13 on only
_PROTECTION: Final = mmap.PROT_READ | mmap.PROT_WRITE
# Private: on shared memory, which is what mmap.mmap(-1, n) gives, MADV_DONTNEED frees nothing.
_FLAGS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, from Python 3.13 on in mmap

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


def reserve(nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """Address space of `nbytes` that starts on a huge page; a page becomes resident, as zeros, at its first touch.

    The array is a buffer. Memory views and tensors over it keep it alive, and its death unmaps the memory. Forked
    children do not have it: a data-loader worker would otherwise copy, page by page, whatever either side writes.
    No page is a huge one unless `advise_huge` says so.

    Raises:
        DeviceError: the system does not give the address space.
    """
    length = nbytes + HUGE_PAGE_BYTES  # room to start on a huge page; never touched, so never resident
    start = _libc.mmap(None, length, _PROTECTION, _FLAGS, -1, 0)
    if start in {None, _MAP_FAILED}:
        raise DeviceError(
            f"cannot reserve {format_bytes(length)} of address space: {os.strerror(ctypes.get_errno())}; "
            "raise the limit of `ulimit -v`, or set vm.overcommit_memory to 0 or 1"
        )
    address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = (ctypes.c_char * nbytes).from_address(address)
    # Not at interpreter exit: threads and late finalizers may still hold tensors then, and the system cleans up anyway.
    weakref.finalize(memory, _unmap, start, length, os.getpid()).atexit = False
    _libc.madvise(start, length, mmap.MADV_DONTFORK)
    # "always" in transparent_hugepage/enabled would otherwise make neighbours of a touched page resident.
    _libc.madvise(start, length, _MADV_NOHUGEPAGE)
    return memory


def advise_huge(address: int, nbytes: int) -> None:
    """Allow huge pages in the whole huge pages that lie *inside* a range.

    Only inside: one that reached beyond would make pages of the neighbour resident at a touch here. A kernel that
    refuses leaves small pages, which cost time and no memory.
    """
    start, stop = _inside(address, nbytes, HUGE_PAGE_BYTES)
    if start < stop:
        _libc.madvise(start, stop - start, mmap.MADV_HUGEPAGE)


def inherit(address: int, nbytes: int, *, inherited: bool) -> None:
    """Has forked children inherit the whole pages of a range, as they do ordinary memory, or no more."""
    start, stop = _inside(address, nbytes, PAGE_BYTES)
    _libc.madvise(start, stop - start, mmap.MADV_DOFORK if inherited else mmap.MADV_DONTFORK)


def discard(address: int, nbytes: int) -> None:
    """Give the pages inside a range back to the system at once; they read as zeros afterwards.

    Raises:
        DeviceError: the kernel refuses, as it does for locked pages.
    """
    start, stop = _inside(address, nbytes, PAGE_BYTES)
    if start < stop and _libc.madvise(start, stop - start, mmap.MADV_DONTNEED):
        raise DeviceError(f"cannot give {format_bytes(nbytes)} back: {os.strerror(ctypes.get_errno())}; is it locked?")


def absent_bytes(address: int, nbytes: int) -> int:
    """Bytes of a range of whole pages whose pages are not resident."""
    pages = ctypes.create_string_buffer(nbytes // PAGE_BYTES)
    if _libc.mincore(address, nbytes, pages):
        raise DeviceError(
            f"cannot ask which pages of {format_bytes(nbytes)} are there: {os.strerror(ctypes.get_errno())}"
        )
    return (len(pages) - sum(pages.raw)) * PAGE_BYTES


def _inside(address: int, nbytes: int, unit: int) -> tuple[int, int]:
    return -(-address // unit) * unit, (address + nbytes) // unit * unit


def _unmap(start: int, length: int, owner: int, *, getpid: Any = os.getpid) -> None:
    # In a forked child other memory may lie at this address by now.
    if getpid() == owner:
        _libc.munmap(start, length)
