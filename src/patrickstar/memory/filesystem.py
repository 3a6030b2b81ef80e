"""The file system below a disk directory: whether the directory can be used, what is free there, whether files there are held in memory."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from patrickstar.errors import DeviceError
from patrickstar.memory.fileio import FileIO, reported

DISK_SHARE: Final = 0.9
"""Share of what is free in its directory that is the disk tier's budget, where none is given."""

_PROBE_BYTES: Final = 4096


def prepare_directory(directory: Path) -> None:
    """Makes the directory if it is not there and its parent is. DeviceError: no parent, not a directory, or nothing can be written there."""
    _place(directory)
    with reported(f"{_argument(directory)}: cannot be made"):
        directory.mkdir(exist_ok=True)
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise DeviceError(
            f"{_argument(directory)}: not writable by this user; change its mode, or name another directory"
        )


def expect_usable(directory: Path, *, io: FileIO | None = None) -> None:
    """Sets a page aside in a file in the directory, and removes the file again. A directory yet to be made is tried at its parent.

    Raises:
        DeviceError: no parent, not a directory, nothing can be written there, or nothing is free.
    """
    io = io or FileIO()
    # As the files of a pool are called: what a process that is killed right here leaves goes with those.
    place = _place(directory)
    probe = place / f"patrickstar-{os.getpid()}-{secrets.token_hex(4)}.probe"
    with reported(f"{_argument(directory)}: files cannot be made in {place}"), ExitStack() as undo:
        fd = io.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        undo.callback(io.close, fd)
        undo.callback(_remove, io, probe)
        io.fallocate(fd, 0, _PROBE_BYTES)
    if not free_bytes(directory):
        raise DeviceError(
            f"{_argument(directory)}: nothing is free in {place} (0 bytes); free space, or name a directory on another disk"
        )


def _remove(io: FileIO, probe: Path) -> None:
    with suppress(FileNotFoundError):  # a pool that looks for files which nobody locks may have been first
        io.unlink(probe)


def free_bytes(directory: Path) -> int:
    """Bytes that this user may still write in a directory. For one yet to be made, what is free at its parent.

    Raises:
        DeviceError: no parent, or not a directory.
    """
    place = _place(directory)
    with reported(f"{_argument(directory)}: cannot be asked what is free"):
        return FileIO().free_bytes(place)


def _place(directory: Path) -> Path:
    """The directory, or its parent where it is yet to be made."""
    with reported(f"{_argument(directory)}: cannot be looked at"):
        place = directory if directory.exists() else directory.parent
        is_there = place.is_dir()
    if not is_there:
        raise DeviceError(
            f"{_argument(directory)}: {place} is no directory; give one that exists, or whose parent does"
        )
    return place


def _argument(directory: Path) -> str:
    return f"disk={str(directory)!r}"


def kept_in_memory(directory: Path, *, root: str = "") -> bool:
    """Tells whether files in this directory are themselves held in memory, as on tmpfs: a disk tier there saves no memory."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path(f"{root}/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split(" ")[2] == number:
            return after.split(" ")[0] in {"tmpfs", "ramfs"}
    return False
