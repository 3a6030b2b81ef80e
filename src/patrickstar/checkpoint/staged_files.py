"""A directory aside, in which what is written comes about before it gets its name; it is gone afterwards, whatever happens.

Files are written front to back: one block fills and is checksummed while the one before is on its way to the disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import uuid
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from patrickstar.checkpoint.format import OLD_PREFIX, FileRecord
from patrickstar.comm.all_ranks import AllRanks
from patrickstar.errors import DeviceError
from patrickstar.memory.fileio import ALIGNMENT, Blocks, FileIO, reported, two_blocks, write_whole
from patrickstar.units import format_bytes

BLOCK_BYTES: Final = 4 << 20  # of one write, a multiple of 4096
_PREFIX = ".tmp-"
_SLACK_BYTES = 1 << 20  # for headers, directories and the file system's own
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class StagedFiles:
    """New files in a directory, one at a time. `records`: the size and checksum of each that is finished."""

    def __init__(self, path: Path, *, io: FileIO, lane: Executor) -> None:
        self.path = path
        self.records: dict[str, FileRecord] = {}
        self._io = io
        self._lane = lane
        self._blocks = two_blocks(BLOCK_BYTES)

    @contextlib.contextmanager
    def new_file(self, path: Path) -> Iterator[FileWriter]:
        """A file to append to, whole and synced afterwards."""
        writer = FileWriter(path, io=self._io, lane=self._lane, blocks=self._blocks)
        try:
            yield writer
            writer.finish()
        except BaseException:
            writer.abort()
            raise
        self.records[path.name] = FileRecord(writer.nbytes, writer.checksum.hexdigest())

    def write(self, path: Path, data: bytes) -> None:
        """A small file."""
        with self.new_file(path) as writer:
            writer.append(memoryview(data))


class FileWriter:
    """A new file; `append` what the file shall hold, then `finish`. Whatever goes wrong, `abort` leaves no descriptor behind.

    Direct I/O where the file system can: through the page cache, the copies and their write-back took most of a core,
    and pushed out pages that others need. The lane has one thread, so at most one block is on its way.
    """

    def __init__(self, path: Path, *, io: FileIO, lane: Executor, blocks: Blocks) -> None:
        self._path = path
        self._io = io
        self._lane = lane
        self._blocks = blocks

        self.nbytes = 0
        self.checksum = hashlib.sha256()
        self._filled = 0
        self._turn = 0
        self._on_its_way: Future[None] | None = None
        with reported(f"{path}: cannot make the file"):
            self._fd: int | None = io.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with contextlib.suppress(OSError):  # where the file system can
            io.set_direct(self._fd)

    def append(self, data: memoryview) -> None:
        """Add bytes at the end, copied: the caller may change them afterwards."""
        self.checksum.update(data)
        at = 0
        while at < len(data):
            block = self._blocks[self._turn]
            taken = min(len(block) - self._filled, len(data) - at)
            block[self._filled : self._filled + taken] = data[at : at + taken]
            at += taken
            self._filled += taken
            self.nbytes += taken
            if self._filled == len(block):
                self._wait()
                self._on_its_way = self._lane.submit(self._write, block, self.nbytes - self._filled)
                self._filled, self._turn = 0, 1 - self._turn

    def finish(self) -> None:
        """Write what is left, and return when the disk has all of it."""
        assert self._fd is not None
        self._wait()
        if self._filled:
            padded = self._filled + -self._filled % ALIGNMENT
            block = self._blocks[self._turn][:padded]
            block[self._filled :] = bytes(padded - self._filled)
            self._write(block, self.nbytes - self._filled)  # nothing is left to overlap it with
        with reported(f"{self._path}: cannot set the size to {self.nbytes} bytes"):
            self._io.truncate(self._fd, self.nbytes)
        with reported(f"{self._path}: cannot sync {self.nbytes} bytes"):
            self._io.fsync(self._fd)
        fd, self._fd = self._fd, None
        with reported(f"{self._path}: cannot close the file"):
            self._io.close(fd)

    def abort(self) -> None:
        """Give up the file; what of it is on the disk stays there for the caller to remove."""
        if self._fd is None:
            return
        # The block on its way reads our memory and writes to our descriptor: wait for it, whatever becomes of it.
        with contextlib.suppress(Exception):
            self._wait()
        fd, self._fd = self._fd, None
        with contextlib.suppress(OSError):
            self._io.close(fd)

    def _wait(self) -> None:
        if self._on_its_way is not None:
            self._on_its_way.result()

    def _write(self, block: memoryview, offset: int) -> None:
        assert self._fd is not None
        write_whole(self._io, self._path, self._fd, block, offset)


@contextlib.contextmanager
def staged(
    directory: Path, nbytes: int, *, io: FileIO, what: str, intact: str, all_ranks: AllRanks
) -> Iterator[StagedFiles]:
    """A directory inside of `directory`, which is made and kept from other writers meanwhile. Of several ranks rank 0 does that, for all.

    Args:
        nbytes: what will be written there. what: its name in messages. intact: what has not been touched where it does not fit.
    Raises:
        DeviceError: the directory cannot be used, another writer is there, less is free, or not all ranks see it.
    """
    with contextlib.ExitStack() as stack:
        name = all_ranks.lead(
            f"{what}: a place for it", lambda: stack.enter_context(_made(directory, nbytes, io, what, intact))
        )
        path = directory / name
        all_ranks.do(f"{what}: a look at its place", lambda: _expect_there(path, io))
        lane = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="patrickstar-checkpoint"))
        yield StagedFiles(path, io=io, lane=lane)


@contextlib.contextmanager
def _made(directory: Path, nbytes: int, io: FileIO, what: str, intact: str) -> Iterator[str]:
    """The name of a new directory inside of `directory`."""
    _make_directories(directory, io)
    with _locked(directory, io, what=what):
        _sweep(directory, io)
        _check_space(directory, nbytes, io, what=what, intact=intact)
        path = aside(directory)
        try:
            with reported(f"{path}: cannot make the directory"):
                io.make_directory(path)
            yield path.name
        finally:
            # What cannot be removed now (the disk may have gone) is swept when the next one is written.
            with contextlib.suppress(OSError):
                remove(path, io)


def _expect_there(path: Path, io: FileIO) -> None:
    with reported(f"{path}: cannot look there"):
        if io.status(path) is None:
            raise DeviceError(
                f"{path}: rank 0 has just made it, and it is not here: give a directory that all ranks see"
            )


def aside(directory: Path) -> Path:
    """A name that no reader looks at and the next writer removes."""
    return directory / f"{_PREFIX}{uuid.uuid4().hex}"


def remove(path: Path, io: FileIO) -> None:
    """Delete a file, a link (not what it points to), or a directory with all that is in it."""
    status = io.status(path)
    if status is None:
        return
    if not stat.S_ISDIR(status.st_mode):
        io.unlink(path)
        return
    for name in io.names(path):
        remove(path / name, io)
    io.remove_directory(path)


def sync_directory(path: Path, io: FileIO) -> None:
    """Makes names in a directory outlast a power cut. DeviceError where that fails."""
    with reported(f"{path}: cannot sync the directory"):
        io.sync_directory(path)


def _make_directories(directory: Path, io: FileIO) -> None:
    """The directory is there, and outlasts a power cut."""
    with reported(f"{directory}: cannot make the directory"):
        missing = [path for path in (directory, *directory.parents) if io.status(path) is None]
        for path in reversed(missing):
            # Another rank or job may make it at the same time.
            with contextlib.suppress(FileExistsError):
                io.make_directory(path)
            io.sync_directory(path.parent)


@contextlib.contextmanager
def _locked(directory: Path, io: FileIO, *, what: str) -> Iterator[None]:
    with reported(f"{directory}: cannot open the directory"):
        fd = io.open(Path(os.path.realpath(directory)), os.O_RDONLY | os.O_DIRECTORY)
    try:
        with reported(f"{directory}: cannot lock the directory"):
            try:
                ours = io.lock(fd)
            except OSError as problem:
                # File systems without locks are used by one writer at a time, as told.
                ours = problem.errno in _NO_LOCKS
                if not ours:
                    raise
        if not ours:
            raise DeviceError(
                f"{directory}: another process or session is writing {what} there; give each its own directory"
            )
        yield
    finally:
        io.unlock(fd)


def _sweep(directory: Path, io: FileIO) -> None:
    """Remove what a crash left behind, and put back what the crash left aside."""
    with reported(f"{directory}: cannot remove what an interrupted writer left"):
        for name in io.names(directory):
            path = directory / name
            if name.startswith(OLD_PREFIX) and io.status(directory / name.removeprefix(OLD_PREFIX)) is None:
                io.rename(path, directory / name.removeprefix(OLD_PREFIX))
                io.sync_directory(directory)
            elif name.startswith((_PREFIX, OLD_PREFIX)):
                remove(path, io)


def _check_space(directory: Path, nbytes: int, io: FileIO, *, what: str, intact: str) -> None:
    with reported(f"{directory}: cannot ask for the space left"):
        free = io.free_bytes(directory)
    if free < nbytes + _SLACK_BYTES:
        raise DeviceError(
            f"{directory}: {what} of {nbytes} bytes ({format_bytes(nbytes)}), {free} bytes "
            f"({format_bytes(free)}) are free: make room for {format_bytes(nbytes + _SLACK_BYTES - free)} or choose "
            f"another disk. Nothing was written; {intact}"
        )
