"""All calls that files are made, filled, read, moved and removed with: one object, passed in, so that a test can make them fail."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from patrickstar.errors import DeviceError, Error
from patrickstar.memory.mapping import reserve
from patrickstar.units import MIB

ALIGNMENT: Final = 4096
"""Of offset, size and memory of a direct transfer."""

Blocks = tuple[memoryview, memoryview]
"""Memory that files pass through, aligned: one block to fill while the other is on its way."""

_REQUEST_BYTES: Final = 8 * MIB  # 4 to 16 MiB saturate a disk
_ADVICE: Final[Mapping[int | None, str]] = MappingProxyType(
    {
        **dict.fromkeys((errno.EACCES, errno.EPERM), "; change its owner or its mode, or name a directory of your own"),
        **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; free space there, or name a directory on another disk"),
        errno.EROFS: "; mount it for writing, or name another directory",
        errno.EIO: "; the disk does not do its work (see the kernel log): name another directory",
        errno.ELOOP: "; it is a symbolic link, which is not followed",
    }
)


@dataclass(frozen=True)
class FileIO:
    """The system's calls, as they are: they raise `OSError`, and may transfer fewer bytes than asked. None follows a link."""

    close = staticmethod(os.close)
    fsync = staticmethod(os.fsync)
    truncate = staticmethod(os.ftruncate)
    fallocate = staticmethod(os.posix_fallocate)
    """Have space for a range of a file, which reads as zeros; no write into it can run out of space later."""
    unlink = staticmethod(os.unlink)
    make_directory = staticmethod(os.mkdir)
    remove_directory = staticmethod(os.rmdir)
    rename = staticmethod(os.rename)
    """Give a file or directory another name; a file that has it is replaced, in one step."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def lock(self, fd: int) -> bool:
        """Take the file's lock, which goes with the open file, at the latest with the process. False: another has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        """Give the lock back and close; without the first, a process forked meanwhile (a data loader's worker) would keep it."""
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def set_direct(self, fd: int) -> None:
        """Transfer past the page cache from now on. `EINVAL` where the file system cannot."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)

    def set_buffered(self, fd: int) -> bool:
        """Transfer through the page cache again. False: it did already."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Bytes read into the front of the buffer; 0 at the end of the file."""
        return os.preadv(fd, [buffer], offset)

    def pwritev(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Bytes written from the front of the buffer."""
        return os.pwritev(fd, [buffer], offset)

    def status(self, path: Path) -> os.stat_result | None:
        """Status of what lies at a path, of the link itself where it is one; None where nothing does."""
        try:
            return path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, directory: Path) -> list[str]:
        """Names in a directory, sorted."""
        return sorted(os.listdir(directory))  # noqa: PTH208 - the same family of calls as the others

    def free_bytes(self, directory: Path) -> int:
        """Bytes that this user may still write into a directory's file system."""
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize

    def sync_directory(self, path: Path) -> None:
        """Make names in a directory outlast a power cut."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def two_blocks(nbytes: int) -> Blocks:
    """Two blocks of `nbytes` each, a multiple of the alignment."""
    assert nbytes > 0
    assert nbytes % ALIGNMENT == 0
    whole = memoryview(reserve(2 * nbytes)).cast("B")
    return whole[:nbytes], whole[nbytes:]


def read_whole(
    io: FileIO, path: Path, fd: int, buffer: memoryview, offset: int, *, least: int = -1, error: type[Error]
) -> None:
    """Fills the buffer, or at least its first `least` bytes where the file may end in it, or raises `error`."""
    nbytes = len(buffer) if least < 0 else least
    _transfer(io, path, fd, buffer, offset, nbytes=nbytes, writes=False, error=error)


def write_whole(io: FileIO, path: Path, fd: int, buffer: memoryview, offset: int) -> None:
    """Writes the whole buffer, or raises a `DeviceError`; how much is on the disk then is not known."""
    _transfer(io, path, fd, buffer, offset, nbytes=len(buffer), writes=True, error=DeviceError)


def _transfer(
    io: FileIO, path: Path, fd: int, buffer: memoryview, offset: int, *, nbytes: int, writes: bool, error: type[Error]
) -> None:
    call, what = (io.pwritev, "cannot write") if writes else (io.preadv, "cannot read")
    done = 0
    while done < nbytes:
        try:
            moved = call(fd, buffer[done : done + _REQUEST_BYTES], offset + done)
            if moved <= 0:
                raise OSError(errno.ENODATA, "no more bytes, as at the file's end")  # noqa: TRY301
        except InterruptedError:
            continue
        except OSError as problem:
            with reported(f"{path}: {what} {nbytes - done} bytes at offset {offset + done}", error):
                # Not aligned as this device wants it, at once or after a short transfer: never wrong when buffered.
                if problem.errno == errno.EINVAL and io.set_buffered(fd):
                    continue
                raise
        done += moved


@contextlib.contextmanager
def reported(what: str, error: type[Error] = DeviceError) -> Iterator[None]:
    """Turns the system's errors into one that says what could not be done, why, and what to change."""
    try:
        yield
    except OSError as problem:
        raise error(f"{what}: {problem.strerror or problem}{_ADVICE.get(problem.errno, '')}") from problem
