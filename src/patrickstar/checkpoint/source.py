"""Open files of a checkpoint, read past the page cache where the file system can.

Reading a gigabyte through the page cache took up to 2.5 s of processor time where that memory was not yet the machine's,
against 0.06 s directly, and would push out what others need. Direct transfers begin and end at multiples of 4096 bytes
and tensors do not: hence the blocks.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from itertools import pairwise
from pathlib import Path

from patrickstar.checkpoint.contents import Identity, identity
from patrickstar.checkpoint.files import ALIGNMENT, BLOCK_BYTES, Blocks, Files, reading
from patrickstar.errors import CheckpointError

__all__ = ["OneSource", "Source"]


class Source:
    """A file by its descriptor, which the source closes."""

    def __init__(self, path: Path, descriptor: int, *, files: Files, blocks: Blocks) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        self._files = files
        self._blocks = blocks

    def read_into(self, out: memoryview, offset: int) -> None:
        """Fill `out` with the bytes from `offset` on.

        Raises:
            CheckpointError: they cannot be read, or the file ends before; with offset and bytes.
        """
        at = 0
        for start, stop in self._windows(offset, len(out)):
            part = self._load(self._blocks.views[0], start, stop)
            out[at : at + len(part)] = part
            at += len(part)

    def stream(self, offset: int, nbytes: int, *, lane: Executor) -> Iterator[memoryview]:
        """The bytes from `offset` on, in views that hold until the next but one: one is read while one is used."""
        windows = self._windows(offset, nbytes)
        if len(windows) == 1:  # nothing to overlap
            yield self._load(self._blocks.views[0], *windows[0])
            return
        waiting = [lane.submit(self._load, self._blocks.views[0], *windows[0])] if windows else []
        try:
            for turn in range(len(windows)):
                view = waiting.pop().result()
                if turn + 1 < len(windows):
                    waiting.append(lane.submit(self._load, self._blocks.views[(turn + 1) % 2], *windows[turn + 1]))
                yield view
        finally:
            for issued in waiting:
                issued.exception()  # given up: nobody wants it, but it must not write to our memory any more

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._files.close(descriptor)

    def _windows(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """The bytes asked for as (start, stop), none across a multiple of the block's size."""
        end, size = offset + nbytes, self._blocks.nbytes
        cuts = [offset, *range(offset + size - offset % size, end, size), end]
        return list(pairwise(cuts)) if nbytes else []

    def _load(self, block: memoryview, start: int, stop: int) -> memoryview:
        """The file's bytes from start to stop, read into the block from the aligned offset before start."""
        assert self._descriptor is not None
        first = start - start % ALIGNMENT
        room = min(stop - first + -stop % ALIGNMENT, len(block))
        at = 0
        while at < stop - first:
            with reading(f"{self.path}: cannot read {stop - first - at} bytes at offset {first + at}"):
                try:
                    taken = self._files.read(self._descriptor, block[at:room], first + at)
                except OSError as problem:
                    # Not aligned as this device wants it, at once or after a short transfer: fine when buffered.
                    if problem.errno == errno.EINVAL and self._files.leave_direct(self._descriptor):
                        continue
                    raise
                if taken <= 0:
                    raise OSError(errno.ENODATA, "the file ends before that")
            at += taken
        return block[start - first : stop - first]


class OneSource:
    """The one of several files that is open: there may be hundreds, and they are read mostly one after the other.

    Args:
        largest_bytes: of any of them. follows_links: whether a path may be a link. changed: what the error says where a file is another one by now.
    """

    def __init__(
        self, files: Files, *, largest_bytes: Callable[[], int], changed: str, follows_links: bool = False
    ) -> None:
        self._files = files
        self._largest_bytes = largest_bytes
        self._changed = changed
        self._follows_links = follows_links

        self._open: list[Source] = []
        self._blocks: list[Blocks] = []
        weakref.finalize(self, _close_all, self._open)

    def at(self, path: Path, wanted: Identity) -> Source:
        """The source of a file, opened if it is not yet.

        Raises:
            CheckpointError: it cannot be opened, or is not the one that was looked at before.
        """
        if not self._open or self._open[0].path != path:
            _close_all(self._open)
            with reading(f"{path}: cannot open the file"):
                real = Path(os.path.realpath(path)) if self._follows_links else path
                descriptor, status = self._files.open(real, direct=True)
            if identity(status) != wanted:
                self._files.close(descriptor)
                raise CheckpointError(f"{path}: {self._changed}")
            if not self._blocks:
                # No larger than the largest file: most checkpoints in tests, and extra data, are small.
                largest = self._largest_bytes()
                self._blocks.append(Blocks(min(BLOCK_BYTES, largest + -largest % ALIGNMENT)))
            self._open.append(Source(path, descriptor, files=self._files, blocks=self._blocks[0]))
        return self._open[0]

    def close(self) -> None:
        """Close the file that is open, if one is, and let go of the blocks. Reading again takes them again."""
        _close_all(self._open)
        self._blocks.clear()


def _close_all(sources: list[Source]) -> None:
    while sources:
        sources.pop().close()
