"""Files that are read past the page cache where the file system can: safetensors files a tensor at a time, and small ones whole.

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
from typing import TypeVar

import torch

from patrickstar.checkpoint.staged_files import BLOCK_BYTES
from patrickstar.checkpoint.tensors import Span, bytes_of, empty, read_header
from patrickstar.errors import CheckpointError
from patrickstar.memory.fileio import ALIGNMENT, Blocks, FileIO, read_whole, reported, two_blocks

Identity = tuple[int, int, int, int]
_Files = TypeVar("_Files", bound="TensorFiles")


class TensorFiles:
    """The tensors of some files, by name. One file is open at a time: there may be hundreds. Use from one thread.

    `spans`: type, shape and place of each, in the order of files and of bytes.

    Args:
        path: what messages call all of them together. changed: what they say of a file that is another one by now.
    """

    def __init__(self, path: Path, *, io: FileIO, changed: str) -> None:
        self.path = path
        self.spans: dict[str, Span] = {}
        self.file_of: dict[str, Path] = {}
        self._io = io
        self._changed = changed
        self._identities: dict[Path, Identity] = {}

        self._open: Source | None = None
        self._blocks: Blocks | None = None

    @property
    def known(self) -> str:
        """The numbers, sizes and times of the files: alike wherever they are seen, and others where they are copies."""
        # A file's device has other numbers on other hosts.
        return str([others for _, *others in self._identities.values()])

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor, of the type that it has in its file, on the CPU."""
        span = self._span(name)
        tensor = empty(span.shape, span.dtype)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, out: torch.Tensor, *, start: int = 0) -> None:
        """Fill `out`, contiguous and on the CPU, with the tensor's elements from number `start` on."""
        span = self._span(name)
        assert out.dtype == span.dtype, f"{name}: read into {out.dtype}, saved as {span.dtype}"
        assert 0 <= start <= span.numel - out.numel(), (
            f"{name}: elements {start} to {start + out.numel()} of {span.numel}"
        )
        self.source(self.file_of[name]).read_into(bytes_of(out), span.offset + start * out.element_size())

    def pieces(self, name: str, numel: int) -> Iterator[torch.Tensor]:
        """The tensor's elements in order, in new 1-D tensors of `numel` elements, the last one shorter."""
        assert numel > 0
        span = self._span(name)
        for start in range(0, span.numel, numel):
            piece = empty((min(numel, span.numel - start),), span.dtype)
            self.read_into(name, piece, start=start)
            yield piece
            del piece  # not to hold two while the next is read

    def add(self, path: Path, *, nbytes: int | None = None, has_tensors: bool = True) -> None:
        """Looks at one more file, of `nbytes`, and reads its header where it has tensors. CheckpointError: it cannot be read, or has one twice."""
        fd, identity = self.opened(path)
        try:
            if nbytes not in (None, identity[2]):
                raise CheckpointError(f"{path}: {identity[2]} bytes, was written with {nbytes}")
            found = read_header(self._io, path, fd) if has_tensors else {}
        finally:
            self._io.close(fd)
        self._identities[path] = identity
        for name, span in found.items():
            if name in self.file_of:
                raise CheckpointError(f"{path}: tensor {name!r} is in {self.file_of[name].name} as well")
            self.spans[name], self.file_of[name] = span, path

    def source(self, path: Path) -> Source:
        """A file that has been looked at, opened if it is not yet. CheckpointError: it cannot be opened, or is another one by now."""
        if self._open is None or self._open.path != path:
            self._close_file()
            fd, identity = self.opened(path)
            if identity != self._identities[path]:
                self._io.close(fd)
                raise CheckpointError(f"{path}: {self._changed}")
            if self._blocks is None:
                # No larger than the largest file: most checkpoints in tests are small.
                largest = max(nbytes for _, _, nbytes, _ in self._identities.values())
                self._blocks = two_blocks(min(BLOCK_BYTES, largest + -largest % ALIGNMENT))
            self._open = Source(path, fd, io=self._io, blocks=self._blocks)
        return self._open

    def close(self) -> None:
        """Close the file that is open, if one is, and let go of the blocks. Reading again takes them again."""
        self._close_file()
        self._blocks = None

    def __enter__(self: _Files) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _span(self, name: str) -> Span:
        try:
            return self.spans[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: holds no tensor {name!r}") from None

    def opened(self, path: Path) -> tuple[int, Identity]:
        """A file's descriptor and identity, as `open_file` gives them."""
        return open_file(path, self._io)

    def _close_file(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open = None


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
        """Fill `out` with the bytes from `offset` on. CheckpointError: they cannot be read, or the file ends before; with offset and bytes."""
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
