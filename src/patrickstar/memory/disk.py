"""The disk tier: every unit has an extent in a file, at a place that does not change once it has been used.

(1) Files are preallocated: running out of space is found when the pool is made.
(2) Extents start and end on multiples of 4096 bytes and do not overlap. In the file of a plane they lie in the order in which units are first
    used, which the steps to come repeat: what rests there is read and written from front to back.
(3) A transfer moves the whole extent or raises a `DeviceError` that names file, offset and bytes; it is never short.
    After a failed write the extent is undefined, after a failed read the buffer is; the other side is as it was.
(4) A file is locked by the pool that made it for as long as that lives. A file that nobody locks was left by a process
    that ended without cleaning up, and the next pool there removes it. (A lock, not a process number: numbers are used
    again, and mean other processes in other containers that share the directory.)
(5) The files are gone after `close()`, when the pool is collected, and at the end of the interpreter.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import weakref
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from patrickstar.core.planes import PlaneRef
from patrickstar.errors import BudgetError, DeviceError, StateError
from patrickstar.memory.fileio import ALIGNMENT, FileIO, read_whole, reported, write_whole
from patrickstar.memory.lanes import Task
from patrickstar.memory.mapping import reserve
from patrickstar.memory.process import lines_of
from patrickstar.units import format_bytes

DISK_SHARE: Final = 0.9
"""Share of what is free in its directory that is the disk tier's budget, where none is given."""

_PROBE_BYTES: Final = 4096
_ATTEMPTS: Final = 8  # to make a file that nobody else removes
_PREFIX: Final = "patrickstar-"

logger = logging.getLogger("patrickstar")


@dataclass(slots=True)
class _File:
    """A file for units of a plane, of which those have places that have been used. `end`: where the next one will lie."""

    path: Path
    fd: int
    end: int = 0


@dataclass(slots=True)
class Extent:
    """The place of a unit on disk: `[offset, offset + nbytes)` of a file, where it lies from its first use on."""

    file: _File
    nbytes: int
    offset: int = -1


class DiskPool:
    """Extents for a fixed set of units, in one file per plane. What was never written reads as zeros.

    Args:
        directory: made if its parent exists.
        units: bytes of every unit that rests on disk, multiples of 4096.
        budget_bytes: what the files may take.
        io: the calls to use.

    Raises:
        BudgetError: the units take more than the budget.
        DeviceError: the directory cannot be used, or has not that much space.
    """

    def __init__(
        self, directory: Path, *, units: Mapping[PlaneRef, int], budget_bytes: int, io: FileIO | None = None
    ) -> None:
        for ref, size in units.items():
            if size < 1 or size % ALIGNMENT:
                raise ValueError(f"{ref} has {size} bytes: expected a multiple of {ALIGNMENT}")
        self.directory = directory
        self.nbytes = 0
        self._io = io or FileIO()

        self._placed: dict[PlaneRef, Extent] = {}
        self._prepared: dict[PlaneRef, Extent] = {}
        self._files: dict[Path, int] = {}
        self.direct = True
        prepare_directory(directory)
        remove_stale_files(directory, io=self._io)
        self._budget_bytes = budget_bytes
        # Made before the first file, so that what follows may fail anywhere.
        self._cleanup = weakref.finalize(self, _remove_files, self._io, self._files, os.getpid())
        self.add(units)
        for ref in units:
            self.take(ref)
        if units and kept_in_memory(directory):
            logger.warning(
                "disk=%s is memory itself (tmpfs): offloading to it frees none; name a directory on a disk", directory
            )

    def add(self, units: Mapping[PlaneRef, int]) -> None:
        """Makes room for more units, or for units that become larger: each lies in its new place from `take` on.

        Raises:
            BudgetError: the units take more than is left of the budget. DeviceError: the directory has not that much space. Nothing has
                changed then.
        """
        replaced = sum(self._placed[ref].nbytes for ref in units if ref in self._placed)
        self.nbytes += sum(units.values()) - replaced
        files, made = set(self._files), dict[PlaneRef, Extent]()
        try:
            self._refuse_unless_it_fits()
            for plane in dict.fromkeys(ref.plane for ref in units):
                own = {ref: size for ref, size in units.items() if ref.plane == plane}
                file = self._make_file(plane, sum(own.values()))
                made |= {ref: Extent(file, size) for ref, size in own.items()}
        except BaseException:
            self.nbytes -= sum(units.values()) - replaced
            _remove_files(self._io, self._files, os.getpid(), keep=files)
            raise
        self._prepared |= made

    def take(self, ref: PlaneRef) -> None:
        """Moves a unit to the place that `add` made for it; its bytes are lost. Files in which nothing lies any more go."""
        self._placed[ref] = self._prepared.pop(ref)
        if not self._prepared:
            used = {extent.file.path for extent in self._placed.values()}
            _remove_files(self._io, self._files, os.getpid(), keep=used)

    def extent(self, ref: PlaneRef) -> Extent:
        """The extent of a unit, which it has from the first time on that it is asked for. StateError where the pool is closed."""
        if not self._cleanup.alive:
            raise StateError(f"the disk pool in {self.directory} is closed")
        extent = self._placed[ref]
        if extent.offset < 0:
            extent.offset = extent.file.end
            extent.file.end += extent.nbytes
        return extent

    def reading(self, ref: PlaneRef, buffer: memoryview) -> Task:
        """The work of filling page-aligned memory of a unit's size with the unit. It raises `DeviceError`."""
        at = self._extent_for(ref, buffer)
        return lambda: read_whole(self._io, at.file.path, at.file.fd, buffer, at.offset, error=DeviceError)

    def writing(self, ref: PlaneRef, buffer: memoryview) -> Task:
        """The work of writing a unit from page-aligned memory of its size. It raises `DeviceError`."""
        at = self._extent_for(ref, buffer)
        return lambda: write_whole(self._io, at.file.path, at.file.fd, buffer, at.offset)

    def close(self) -> None:
        """Removes the files. No transfer may be under way."""
        self._placed.clear()
        self._cleanup()

    def _refuse_unless_it_fits(self) -> None:
        budget = self._budget_bytes
        if self.nbytes > budget:
            raise BudgetError(
                f"disk memory is {format_bytes(self.nbytes - budget)} short: {format_bytes(self.nbytes)} of model states "
                f"are offloaded to {self.directory}; budget {format_bytes(budget)}\n"
                f"  fits with: disk_memory >= {format_bytes(self.nbytes)}  |  more host_memory",
                tier="disk",
                needed_bytes=self.nbytes,
                available_bytes=budget,
                smallest_bytes=self.nbytes,
            )
        free = free_bytes(self.directory)
        wanted = self.nbytes - sum(extent.nbytes for extent in self._placed.values())
        if wanted > free:
            raise DeviceError(
                f"disk={self.directory}: {format_bytes(wanted)} of model states are offloaded to it, {format_bytes(free)} are "
                f"free; free {format_bytes(wanted - free)}, or name a directory on another disk"
            )

    def _make_file(self, plane: str, nbytes: int) -> _File:
        with reported(f"{self.directory}: cannot make a file"):
            path, fd = self._open_locked(plane)
        with reported(f"{path}: cannot set {nbytes} bytes aside ({format_bytes(nbytes)} for {plane})"):
            self._io.fallocate(fd, 0, nbytes)
        if self.direct:
            self._go_direct(fd)
        return _File(path, fd)

    def _open_locked(self, plane: str) -> tuple[Path, int]:
        for _ in range(_ATTEMPTS):
            path = self.directory / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}.{plane}"
            fd = self._files[path] = self._io.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                if self._io.lock(fd) and os.fstat(fd).st_nlink:
                    return path, fd
            except OSError:
                return path, fd  # no locks on this file system: then nobody takes the file for a stale one either
            # A pool that looked for stale files between our open and our lock took it for one.
            self._io.close(self._files.pop(path))
        raise BlockingIOError(errno.EAGAIN, "other processes remove the files as they are made")

    def _go_direct(self, fd: int) -> None:
        page = memoryview(reserve(ALIGNMENT)).cast("B")
        with reported(f"{self.directory}: cannot set direct I/O up"):
            try:
                self._io.set_direct(fd)
                self._io.pwritev(fd, page, 0)  # some take the flag and no transfer
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
        if not self.direct:
            for opened in self._files.values():
                self._io.set_buffered(opened)
            logger.warning(
                "disk=%s: this file system has no direct I/O; transfers go through the page cache, which is slower",
                self.directory,
            )

    def _extent_for(self, ref: PlaneRef, buffer: memoryview) -> Extent:
        extent = self._placed.get(ref)
        if extent is None or extent.offset < 0:
            extent = self.extent(ref)
        if buffer.nbytes != extent.nbytes or not buffer.contiguous:
            raise ValueError(f"{ref} has {extent.nbytes} bytes, the buffer {buffer.nbytes}")
        return extent


def remove_stale_files(directory: Path, *, io: FileIO | None = None) -> int:
    """Removes what pools of ended processes left in a directory, never a file that a living pool has; gives how many files."""
    io = io or FileIO()
    removed = 0
    for path in sorted(directory.glob(f"{_PREFIX}*.*")):
        try:
            fd = io.open(path, os.O_RDWR)
        except OSError:  # another user's, or gone since
            continue
        try:
            if io.lock(fd):
                io.unlink(path)
                removed += 1
        except OSError:  # no locks on this file system, or not ours to remove
            continue
        finally:
            io.close(fd)
    if removed:
        logger.info("disk=%s: removed %d files that an ended process left", directory, removed)
    return removed


def _remove_files(io: FileIO, files: dict[Path, int], owner: int, *, keep: Collection[Path] = ()) -> None:
    if os.getpid() != owner:  # a forked child ends, or collects its copy of the pool: the files are the parent's
        return
    for path in [path for path in files if path not in keep]:
        try:
            io.unlink(path)
        except OSError as error:
            if error.errno != errno.ENOENT:
                logger.warning("%s: cannot be removed: %s; remove it by hand", path, error.strerror)
        io.close(files.pop(path))


def prepare_directory(directory: Path) -> None:
    """Makes the directory if it is not there and its parent is. DeviceError: no parent, not a directory, or nothing can be written there."""
    _place(directory)
    with reported(f"{_argument(directory)}: cannot be made"):
        directory.mkdir(exist_ok=True)
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise DeviceError(
            f"{_argument(directory)}: not writable by this user; change its mode, or name another directory"
        )


def expect_usable(directory: Path, *, io: FileIO | None = None) -> None:
    """Sets a page aside in a file in the directory, and removes the file again. A directory yet to be made is tried at its parent.

    Raises:
        DeviceError: no parent, not a directory, nothing can be written there, or nothing is free.
    """
    io = io or FileIO()
    # As the files of a pool are called: what a process that is killed right here leaves goes with those.
    place = _place(directory)
    probe = place / f"patrickstar-{os.getpid()}-{secrets.token_hex(4)}.probe"
    with reported(f"{_argument(directory)}: files cannot be made in {place}"), ExitStack() as undo:
        fd = io.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        undo.callback(io.close, fd)
        undo.enter_context(
            suppress(FileNotFoundError)
        )  # a pool that looks for files which nobody locks may have been first
        undo.callback(io.unlink, probe)
        io.fallocate(fd, 0, _PROBE_BYTES)
    if not free_bytes(directory):
        raise DeviceError(
            f"{_argument(directory)}: nothing is free in {place} (0 bytes); free space, or name a directory on another disk"
        )


def free_bytes(directory: Path) -> int:
    """Bytes that this user may still write in a directory. For one yet to be made, what is free at its parent.

    Raises:
        DeviceError: no parent, or not a directory.
    """
    place = _place(directory)
    with reported(f"{_argument(directory)}: cannot be asked what is free"):
        return FileIO().free_bytes(place)


def _place(directory: Path) -> Path:
    """The directory, or its parent where it is yet to be made."""
    with reported(f"{_argument(directory)}: cannot be looked at"):
        place = directory if directory.exists() else directory.parent
        is_there = place.is_dir()
    if not is_there:
        raise DeviceError(
            f"{_argument(directory)}: {place} is no directory; give one that exists, or whose parent does"
        )
    return place


def _argument(directory: Path) -> str:
    return f"disk={str(directory)!r}"


def kept_in_memory(directory: Path, *, root: str = "") -> bool:
    """Tells whether files in this directory are themselves held in memory, as on tmpfs: a disk tier there saves no memory."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = (line.partition(" - ") for line in lines_of(Path(f"{root}/proc/self/mountinfo")))
    kinds = (after.split(" ")[0] for before, _, after in mounts if before.split(" ")[2] == number)
    return next(kinds, "") in {"tmpfs", "ramfs"}
