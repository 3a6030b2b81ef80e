"""Directories that are written to: made, held for one writer, measured, synced, removed."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path

from patrickstar.checkpoint.files import Files, writing
from patrickstar.errors import DeviceError
from patrickstar.units import format_bytes

__all__ = ["TEMPORARY_PREFIX", "check_space", "locked", "make_directories", "remove", "sync_directory"]

TEMPORARY_PREFIX = ".tmp-"
_SLACK_BYTES = 1 << 20  # for headers, directories and the file system's own


def make_directories(directory: Path, disk: Files) -> None:
    """The directory is there, and outlasts a power cut."""
    with writing(f"{directory}: cannot make the directory"):
        missing = [path for path in (directory, *directory.parents) if disk.status(path) is None]
        for path in reversed(missing):
            # Another rank or job may make it at the same time.
            with contextlib.suppress(FileExistsError):
                disk.make_directory(path)
            disk.sync_directory(path.parent)


@contextlib.contextmanager
def locked(directory: Path, disk: Files, *, what: str) -> Iterator[None]:
    """Keeps others from writing there meanwhile."""
    with writing(f"{directory}: cannot open the directory"):
        try:
            descriptor = disk.lock(directory)
        except BlockingIOError:
            raise DeviceError(
                f"{directory}: another process or session is writing {what} there; give each its own directory"
            ) from None
    try:
        yield
    finally:
        disk.unlock(descriptor)


def check_space(directory: Path, nbytes: int, disk: Files, *, what: str, intact: str) -> None:
    """DeviceError where so many bytes do not fit; `intact`: what has not been touched, for its message."""
    with writing(f"{directory}: cannot ask for the space left"):
        free = disk.free_bytes(directory)
    if free < nbytes + _SLACK_BYTES:
        raise DeviceError(
            f"{directory}: {what} of {nbytes} bytes ({format_bytes(nbytes)}), {free} bytes "
            f"({format_bytes(free)}) are free: make room for {format_bytes(nbytes + _SLACK_BYTES - free)} or choose "
            f"another disk. Nothing was written; {intact}"
        )


def remove(path: Path, disk: Files) -> None:
    """Delete a file, a link (not what it points to), or a directory with all that is in it."""
    status = disk.status(path)
    if status is None:
        return
    if not stat.S_ISDIR(status.st_mode):
        disk.remove_file(path)
        return
    for name in disk.names(path):
        remove(path / name, disk)
    disk.remove_directory(path)


def sync_directory(path: Path, disk: Files) -> None:
    """Makes names in a directory outlast a power cut. DeviceError where that fails."""
    with writing(f"{path}: cannot sync the directory"):
        disk.sync_directory(path)
