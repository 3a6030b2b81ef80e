"""The file system below a disk directory: whether the directory can be used, what is free there, whether it is a disk."""

from __future__ import annotations

import os
from pathlib import Path

from patrickstar.errors import DeviceError

__all__ = ["default_disk_bytes", "free_bytes", "kept_in_memory", "prepare_directory"]


def prepare_directory(directory: Path) -> None:
    """Make the directory if it is not there and its parent is.

    Raises:
        DeviceError: no parent, not a directory, or nothing can be written there.
    """
    try:
        directory.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise DeviceError(
            f"disk={directory}: the parent {directory.parent} does not exist; make it, or name another directory"
        ) from error
    except (FileExistsError, NotADirectoryError) as error:
        raise DeviceError(f"disk={directory}: not a directory; name one, or one to be made") from error
    except OSError as error:
        raise DeviceError(f"disk={directory}: cannot be made: {error.strerror}; name another directory") from error
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise DeviceError(f"disk={directory}: not writable by this user; change its mode, or name another directory")


def free_bytes(directory: Path) -> int:
    """What this user may still write there. For a directory yet to be made, what is free at its parent."""
    place = directory if directory.exists() else directory.parent
    try:
        found = os.statvfs(place)
    except OSError as error:
        raise DeviceError(f"disk={directory}: {place}: {error.strerror}; name another directory") from error
    return found.f_bavail * found.f_frsize


def default_disk_bytes(directory: Path) -> int:
    """The budget of the disk tier where none is given: 90 % of what is free there."""
    return free_bytes(directory) * 9 // 10


def kept_in_memory(directory: Path, *, root: str = "") -> bool:
    """Whether files in this directory are themselves held in memory, as on tmpfs: then it saves none."""
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
