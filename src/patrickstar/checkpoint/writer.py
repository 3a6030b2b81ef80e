"""A file written front to back: one block fills and is checksummed while the one before is on its way to the disk."""

from __future__ import annotations

import contextlib
import errno
from concurrent.futures import Executor, Future
from pathlib import Path

from patrickstar.checkpoint.files import ALIGNMENT, Blocks, Files, writing

__all__ = ["FileWriter", "write_file"]


class FileWriter:
    """A new file; `append` what the file shall hold, then `finish`. Whatever goes wrong, `abort` leaves no descriptor behind.

    Direct I/O where the file system can: through the page cache, the copies and their write-back took most of a core,
    and pushed out pages that others need. The lane has one thread, so at most one block is on its way.
    """

    def __init__(self, path: Path, *, files: Files, lane: Executor, blocks: Blocks) -> None:
        self._path = path
        self._files = files
        self._lane = lane
        self._blocks = blocks

        self.nbytes = 0
        self._filled = 0
        self._turn = 0
        self._on_its_way: Future[None] | None = None
        with writing(f"{path}: cannot make the file"):
            self._descriptor: int | None = files.create(path, direct=True)

    def append(self, data: memoryview) -> None:
        """Add bytes at the end, copied: the caller may change them afterwards."""
        at = 0
        while at < len(data):
            taken = min(self._blocks.nbytes - self._filled, len(data) - at)
            self._blocks.views[self._turn][self._filled : self._filled + taken] = data[at : at + taken]
            at += taken
            self._filled += taken
            self.nbytes += taken
            if self._filled == self._blocks.nbytes:
                self._issue(self._filled)

    def finish(self) -> None:
        """Write what is left, and return when the disk has all of it."""
        assert self._descriptor is not None
        self._wait()
        if self._filled:
            padded = self._filled + -self._filled % ALIGNMENT
            block = self._blocks.views[self._turn][:padded]
            block[self._filled :] = bytes(padded - self._filled)
            self._write(block, self.nbytes - self._filled)  # nothing is left to overlap it with
            self._filled = 0
        with writing(f"{self._path}: cannot set the size to {self.nbytes} bytes"):
            self._files.set_size(self._descriptor, self.nbytes)
        with writing(f"{self._path}: cannot sync {self.nbytes} bytes"):
            self._files.sync(self._descriptor)
        descriptor, self._descriptor = self._descriptor, None
        with writing(f"{self._path}: cannot close the file"):
            self._files.close(descriptor)

    def abort(self) -> None:
        """Give up the file; what of it is on the disk stays there for the caller to remove."""
        if self._descriptor is None:
            return
        # The block on its way reads our memory and writes to our descriptor: wait for it, whatever becomes of it.
        with contextlib.suppress(Exception):
            self._wait()
        descriptor, self._descriptor = self._descriptor, None
        with contextlib.suppress(OSError):
            self._files.close(descriptor)

    def _issue(self, nbytes: int) -> None:
        self._wait()
        offset = self.nbytes - self._filled
        self._on_its_way = self._lane.submit(self._write, self._blocks.views[self._turn][:nbytes], offset)
        self._filled, self._turn = 0, 1 - self._turn

    def _wait(self) -> None:
        if self._on_its_way is not None:
            issued, self._on_its_way = self._on_its_way, None
            issued.result()

    def _write(self, block: memoryview, offset: int) -> None:
        assert self._descriptor is not None
        at = 0
        while at < len(block):
            with writing(f"{self._path}: cannot write {len(block) - at} bytes at offset {offset + at}"):
                try:
                    written = self._files.write(self._descriptor, block[at:], offset + at)
                except OSError as problem:
                    # Not aligned as this device wants it, at once or after a short transfer: never wrong when buffered.
                    if problem.errno == errno.EINVAL and self._files.leave_direct(self._descriptor):
                        continue
                    raise
                if written <= 0:
                    raise OSError(errno.EIO, "the device took no bytes")
            at += written


def write_file(path: Path, data: bytes, *, files: Files, lane: Executor, blocks: Blocks) -> None:
    """A small file, whole and synced."""
    writer = FileWriter(path, files=files, lane=lane, blocks=blocks)
    try:
        writer.append(memoryview(data))
        writer.finish()
    except BaseException:
        writer.abort()
        raise
