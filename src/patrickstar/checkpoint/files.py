"""Every file operation of a checkpoint, one method each, and the memory that files pass through: the seam at which tests make disks fail.

The operations are the operating system's own: short transfers and errors come through as they are, and those who use
them continue or report. Nothing here follows a symbolic link: what lies in a checkpoint was written there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from patrickstar.errors import CheckpointError, DeviceError, Error

__all__ = ["ALIGNMENT", "BLOCK_BYTES", "Blocks", "Files", "reading", "writing"]

ALIGNMENT = 4096  # of offset, size and memory of a direct transfer
BLOCK_BYTES = 4 << 20


class Files:
    """The operating system's files. Every method may raise `OSError`."""

    def status(self, path: Path) -> os.stat_result | None:
        """Status of what lies at a path, of the link itself where it is one; None where nothing does."""
        try:
            return path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, directory: Path) -> list[str]:
        """Names in a directory, sorted."""
        return sorted(path.name for path in directory.iterdir())

    def free_bytes(self, directory: Path) -> int:
        """Bytes this user may still write into a directory's file system."""
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize

    def make_directory(self, path: Path) -> None:
        path.mkdir()

    def sync_directory(self, path: Path) -> None:
        """Make names in a directory outlast a power cut."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lock(self, directory: Path) -> int:
        """A descriptor that holds the directory for one writer. Raises BlockingIOError while another has it."""
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as problem:
            # File systems without locks are used by one writer at a time, as told; the others are kept apart.
            if isinstance(problem, OSError) and problem.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                return descriptor
            os.close(descriptor)
            raise
        return descriptor

    def unlock(self, descriptor: int) -> None:
        # Said outright: a process forked meanwhile (a data loader's worker) shares the lock and would keep it.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

    def create(self, path: Path, *, direct: bool = False) -> int:
        """A descriptor of a new file to write; `direct` bypasses the page cache where the file system can."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644)
        except OSError as problem:
            if not direct or problem.errno != errno.EINVAL:
                raise
        # Some file systems make the file before they refuse the flag.
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return os.open(path, flags, 0o644)

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Bytes written, which may be fewer than asked for."""
        return os.pwrite(descriptor, data, offset)

    def leave_direct(self, descriptor: int) -> bool:
        """Go on through the page cache; whether the descriptor bypassed it until now."""
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if not flags & os.O_DIRECT:
            return False
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return True

    def set_size(self, descriptor: int, nbytes: int) -> None:
        os.ftruncate(descriptor, nbytes)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file over what is at its new name, in one step."""
        source.replace(target)

    def remove_file(self, path: Path) -> None:
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        path.rmdir()

    def open(self, path: Path, *, direct: bool = False) -> tuple[int, os.stat_result]:
        """A descriptor of a regular file to read, and its status; `direct` as in `create`."""
        # O_NONBLOCK: opening a pipe that somebody put there must not wait for a writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(path, flags | (os.O_DIRECT if direct else 0))
        except OSError as problem:
            if not direct or problem.errno != errno.EINVAL:
                raise
            descriptor = os.open(path, flags)
        try:
            found = os.fstat(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file")
        return descriptor, found

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Bytes read into the buffer, which may be fewer than it has room for; 0 at the file's end."""
        return os.preadv(descriptor, [buffer], offset)


class Blocks:
    """Two blocks of memory, page aligned as direct I/O wants them: one to fill while the other is on its way."""

    def __init__(self, nbytes: int = BLOCK_BYTES) -> None:
        assert nbytes > 0
        assert nbytes % ALIGNMENT == 0
        self.nbytes = nbytes
        # Private: shared anonymous memory would be counted, and kept, as a file's.
        whole = memoryview(mmap.mmap(-1, 2 * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self.views = (whole[:nbytes], whole[nbytes:])


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Turns the operating system's errors into a `DeviceError` that says what could not be done."""
    with _reported(what, DeviceError):
        yield


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns the operating system's errors into a `CheckpointError` that says what could not be read."""
    with _reported(what, CheckpointError):
        yield


@contextlib.contextmanager
def _reported(what: str, kind: type[Error]) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        link = "; it is a symbolic link, which a checkpoint never has" if problem.errno == errno.ELOOP else ""
        raise kind(f"{what}: {problem.strerror or problem}{link}") from problem
