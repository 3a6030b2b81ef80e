"""Files that fail on demand: at one operation, from one operation on, by dying there, or by losing power."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patrickstar.memory.fileio import FileIO

KINDS = ("ENOSPC", "EIO", "gone", "short", "short and full", "kill", "kill after half", "power cut", "torn cut")
_OPERATIONS = (
    *("status", "names", "free_bytes", "make_directory", "sync_directory", "lock", "open", "set_direct", "pwritev"),
    *("truncate", "fsync", "close", "rename", "unlink", "remove_directory", "preadv"),
)


class NotDirect(FileIO):
    """A file system that takes the flag and then refuses what is not aligned as it wants it."""

    buffered = False

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._refuse()
        return super().preadv(fd, buffer, offset)

    def pwritev(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._refuse()
        return super().pwritev(fd, buffer, offset)

    def _refuse(self) -> None:
        if not self.buffered:
            raise OSError(errno.EINVAL, "not aligned")

    def set_buffered(self, fd: int) -> bool:
        super().set_buffered(fd)
        before, self.buffered = self.buffered, True
        return not before


class Killed(BaseException):
    """The process ended here: nothing after it happens, clean-up included."""


@dataclass
class _Change:
    """A name that changed in a directory (under its present path), and how to take that back."""

    directory: Path
    undo: Callable[[Path], object]


class FaultyFiles(FileIO):
    """Files whose operation number `at` fails, as `kind` says; a verified fake of `FileIO` while `at` is out of reach.

    ENOSPC, EIO: that operation, once. gone: it and all that follow (EIO). short: a transfer of half the bytes.
    short and full: half the bytes, then ENOSPC for ever. kill: it and all that follow do not happen.
    kill after half: likewise, but half of a transfer happens. power cut: as kill, and what was not synced is lost.
    torn cut: likewise, but the last of the names that changed has reached the disk, before those changed earlier.
    """

    def __init__(self, *, at: int = -1, kind: str = "EIO") -> None:
        assert kind in KINDS
        self.at = at
        self.kind = kind

        self.log: list[str] = []
        self._dead = self._gone = self._full = False
        self._unsynced: set[int] = set()  # descriptors of files with bytes that were not synced
        self._changes: list[_Change] = []  # of names, since their directory was synced
        for name in _OPERATIONS:
            setattr(self, name, self._failing(name, getattr(super(), name)))

    def _failing(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            if self._dead:
                raise Killed
            if self._gone:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            number = len(self.log)
            makes = name == "open" and arguments[1] & os.O_CREAT
            self.log.append(f"{'create' if makes else name} {arguments[0]}")
            if name == "pwritev" and self._full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self._fail(name, act, arguments) if number == self.at else self._act(name, act, arguments)

        return operation

    def _fail(self, name: str, act: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        half = name in ("pwritev", "preadv") and self.kind in ("short", "short and full", "kill after half")
        result: Any = None
        if half:
            fd, data, offset = arguments
            result = self._act(name, act, (fd, data[: max(1, len(data) // 2)], offset))
        match self.kind:
            case "ENOSPC" | "EIO":
                code = getattr(errno, self.kind)
                raise OSError(code, os.strerror(code))
            case "gone":
                self._gone = True
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "kill" | "kill after half":
                self._dead = True
                raise Killed
            case "power cut" | "torn cut":
                self._dead = True
                self._lose()
                raise Killed
        self._full = self.kind == "short and full" and name == "pwritev"
        return result if half else self._act(name, act, arguments)

    def _act(self, name: str, act: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Do it, and note what a power cut would take back. Nothing is really synced: that would only take time."""
        before = None
        match name:
            case "fsync":
                self._unsynced.discard(arguments[0])
                return None
            case "sync_directory":
                self._changes = [change for change in self._changes if change.directory != arguments[0]]
                return None
            case "pwritev":
                self._unsynced.add(arguments[0])
            case "close" if arguments[0] in self._unsynced:
                self._unsynced.remove(arguments[0])
                self._unsynced.add(os.dup(arguments[0]))  # the file may have another name by the time it is lost
            case "rename":
                before = arguments[1].read_bytes() if arguments[1].is_file() else None
        result = act(*arguments)
        if name == "open" and arguments[1] & os.O_CREAT:
            made = arguments[0]
            self._changes.append(_Change(made.parent, lambda now: (now / made.name).unlink()))
        elif name == "rename":
            self._changes.append(self._renamed(*arguments, before))
        return result

    def _renamed(self, source: Path, target: Path, before: bytes | None) -> _Change:
        if before is not None:
            return _Change(target.parent, lambda _: target.write_bytes(before))
        for change in self._changes:
            if change.directory == source:
                change.directory = target
        return _Change(target.parent, lambda _: target.rename(source))

    def _lose(self) -> None:
        for descriptor in self._unsynced:
            os.ftruncate(descriptor, 0)
        for change in reversed(self._changes[:-1] if self.kind == "torn cut" else self._changes):
            # Deleted meanwhile: that was not synced either, but names may be lost in any order.
            with contextlib.suppress(OSError):
                change.undo(change.directory)
