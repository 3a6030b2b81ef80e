"""File calls that fail on demand, for tests of what happens then."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from patrickstar.memory.fileio import FileIO

__all__ = ["Fails", "FaultyIO", "Short"]


@dataclass(frozen=True, slots=True)
class Fails:
    """A fault: the `nth` use of a call, counted from 1, and the `times - 1` after it, raise `OSError` with an error number.

    `Fails("pwritev", errno.ENOSPC, nth=3)`; with `errno.EINTR` it is an interrupted call.
    """

    call: str
    number: int
    nth: int = 1
    times: int = 1


@dataclass(frozen=True, slots=True)
class Short:
    """A fault: the `nth` transfer, and the `times - 1` after it, move at most `nbytes`; with 0 nothing, as at a file's end."""

    call: str
    nbytes: int
    nth: int = 1
    times: int = 1


class FaultyIO(FileIO):
    """The real calls, on real files, with the given faults. `counts` has the uses of each call so far."""

    def __init__(self, *faults: Fails | Short) -> None:
        self.faults = list(faults)

        self.counts: Counter[str] = Counter()
        self.hit: list[Fails | Short] = []

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self._count("open")
        return super().open(path, flags, mode)

    def close(self, fd: int) -> None:
        super().close(fd)  # first: a close that reports an error has closed
        self._count("close")

    def lock(self, fd: int) -> bool:
        self._count("lock")
        return super().lock(fd)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._count("fallocate")
        super().fallocate(fd, offset, nbytes)

    def set_direct(self, fd: int) -> None:
        self._count("set_direct")
        super().set_direct(fd)

    def set_buffered(self, fd: int) -> None:
        self._count("set_buffered")
        super().set_buffered(fd)

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        buffer = self._cut(buffer, self._count("preadv"))
        return super().preadv(fd, buffer, offset) if len(buffer) else 0

    def pwritev(self, fd: int, buffer: memoryview, offset: int) -> int:
        buffer = self._cut(buffer, self._count("pwritev"))
        return super().pwritev(fd, buffer, offset) if len(buffer) else 0

    def fsync(self, fd: int) -> None:
        self._count("fsync")
        super().fsync(fd)

    def unlink(self, path: Path) -> None:
        self._count("unlink")
        super().unlink(path)

    def _count(self, call: str) -> Short | None:
        self.counts[call] += 1
        for fault in self.faults:
            if fault.call == call and fault.nth <= self.counts[call] < fault.nth + fault.times:
                self.hit.append(fault)
                if isinstance(fault, Short):
                    return fault
                raise OSError(fault.number, os.strerror(fault.number))
        return None

    @staticmethod
    def _cut(buffer: memoryview, fault: Short | None) -> memoryview:
        return buffer if fault is None else buffer[: fault.nbytes]
