"""A file written front to back: one block fills and is checksummed while the one before is on its way to the disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Final

from patrickstar.memory.fileio import ALIGNMENT, Blocks, FileIO, reported, write_whole

BLOCK_BYTES: Final = 4 << 20


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
            issued, self._on_its_way = self._on_its_way, None
            issued.result()

    def _write(self, block: memoryview, offset: int) -> None:
        assert self._fd is not None
        write_whole(self._io, self._path, self._fd, block, offset)
