"""An open file that is read past the page cache where the file system can, and small files that are read whole.

A gigabyte through the page cache took up to 2.5 s of processor time, directly 0.06 s. Direct transfers are aligned, tensors are not: hence blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from patrickstar.errors import CheckpointError
from patrickstar.memory.fileio import ALIGNMENT, Blocks, FileIO, read_whole, reported

Identity = tuple[int, int, int, int]


def open_file(path: Path, io: FileIO) -> tuple[int, Identity]:
    """A descriptor of a regular file, and numbers by which the file is known again: another one at its path, or other contents, have others.

    The third is its size. Raises CheckpointError.
    """
    with reported(f"{path}: cannot open the file", CheckpointError):
        # O_NONBLOCK: opening a pipe that somebody put there must not wait for a writer.
        fd = io.open(path, os.O_RDONLY | os.O_NONBLOCK)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            io.close(fd)
            raise OSError(errno.EINVAL, "not a regular file")
    return fd, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def read_small(path: Path, most: int, io: FileIO) -> bytes:
    """The bytes of a file of at most `most` bytes. CheckpointError where it has more, or cannot be read."""
    fd, (_, _, nbytes, _) = open_file(path, io)
    try:
        if nbytes > most:
            raise CheckpointError(f"{path}: {nbytes} bytes; such a file has at most {most}")
        data = bytearray(nbytes)
        read_whole(io, path, fd, memoryview(data), 0, error=CheckpointError)
    finally:
        io.close(fd)
    return bytes(data)


class Source:
    """A file by its descriptor. `close`: closes it, at the latest when nobody has the source any more."""

    def __init__(self, path: Path, fd: int, *, io: FileIO, blocks: Blocks) -> None:
        self.path = path
        self.fd = fd
        self.close = weakref.finalize(self, io.close, fd)
        self._io = io
        self._blocks = blocks
        with contextlib.suppress(OSError):  # where the file system can
            io.set_direct(fd)

    def read_into(self, out: memoryview, offset: int) -> None:
        """Fill `out` with the bytes from `offset` on.

        Raises:
            CheckpointError: they cannot be read, or the file ends before; with offset and bytes.
        """
        at = 0
        for start, stop in self._windows(offset, len(out)):
            part = self._load(self._blocks[0], start, stop)
            out[at : at + len(part)] = part
            at += len(part)

    def stream(self, nbytes: int) -> Iterator[memoryview]:
        """The first bytes of the file, in views that hold until the next is asked for: one is read while one is used."""
        coming: Future[memoryview] | None = None
        # The lane's end waits for what is on its way: nothing may write to our memory later.
        with ThreadPoolExecutor(1, thread_name_prefix="patrickstar-checkpoint") as lane:
            for turn, (start, stop) in enumerate(self._windows(0, nbytes)):
                ready, coming = coming, lane.submit(self._load, self._blocks[turn % 2], start, stop)
                if ready is not None:
                    yield ready.result()
            if coming is not None:
                yield coming.result()

    def _windows(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """The bytes asked for as (start, stop), none across a multiple of the block's size."""
        end, size = offset + nbytes, len(self._blocks[0])
        cuts = [offset, *range(offset + size - offset % size, end, size), end]
        return list(pairwise(cuts)) if nbytes else []

    def _load(self, block: memoryview, start: int, stop: int) -> memoryview:
        """The file's bytes from start to stop, read into the block from the aligned offset before start."""
        first = start - start % ALIGNMENT
        room = min(stop - first + -stop % ALIGNMENT, len(block))
        read_whole(self._io, self.path, self.fd, block[:room], first, least=stop - first, error=CheckpointError)
        return block[start - first : stop - first]
