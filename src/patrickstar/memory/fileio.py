"""The calls that files are made, filled and removed with: one object, passed in, so that a test can make them fail.

`patrickstar.testing.faults.FaultyIO` is the one that fails on demand. Both satisfy one contract suite.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["FileIO"]


class FileIO:
    """The system's calls, as they are: they raise `OSError`, and may transfer fewer bytes than asked."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def lock(self, fd: int) -> bool:
        """Take the file's lock, which goes with the open file, at the latest with the process. False: another has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Have space for a range, which reads as zeros; no write into it can run out of space later."""
        os.posix_fallocate(fd, offset, nbytes)

    def set_direct(self, fd: int) -> None:
        """Transfer past the page cache from now on. `EINVAL` where the file system cannot."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)

    def set_buffered(self, fd: int) -> None:
        """Transfer through the page cache again."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Bytes read into the front of the buffer; 0 at the end of the file."""
        return os.preadv(fd, [buffer], offset)

    def pwritev(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Bytes written from the front of the buffer."""
        return os.pwritev(fd, [buffer], offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def unlink(self, path: Path) -> None:
        os.unlink(path)  # noqa: PTH108 - the same family of calls as the others
