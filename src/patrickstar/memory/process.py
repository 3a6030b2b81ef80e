"""Sizes of this process: the memory that it holds, and the memory that it may still take, read from the kernel, never kept.

Control groups, versions 1 and 2, limit memory: those that hold this process, from its own group up to the root.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from patrickstar.errors import DeviceError


def resident_bytes(*, root: str = "") -> int:
    """The resident size now, files mapped included, in 2.5 microseconds.

    Opened anew each time: a descriptor kept would go on showing the parent in a forked child, for 1.5 microseconds less.
    Kernels from 6.2 to 6.16 may be off by some 100 KiB per processor.
    """
    try:
        file = os.open(f"{root}/proc/self/statm", os.O_RDONLY)
    except OSError as error:
        raise _no_proc(error) from error
    try:
        return int(os.read(file, 128).split(None, 2)[1]) * mmap.PAGESIZE
    finally:
        os.close(file)


def peak_resident_bytes(*, root: str = "") -> int:
    """The largest resident size since the process started, or since `reset_peak`."""
    return _field(Path(f"{root}/proc/self/status"), "VmHWM")


def reset_peak(*, root: str = "") -> bool:
    """Make the peak start anew from the size now; whether the kernel let us.

    For the command line and for tests, which own the process. A library must not: others may be measuring.
    """
    try:
        Path(f"{root}/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def available_bytes(*, root: str = "") -> int:
    """Bytes that this process may still take: the least of what the machine has and what each control group above it allows."""
    machine = _field(Path(f"{root}/proc/meminfo"), "MemAvailable")
    return min([machine, *(group.available_bytes for group in memory_groups(root=root))])


def total_bytes(*, root: str = "") -> int:
    """The machine's memory, or the least limit of a control group above this process."""
    machine = _field(Path(f"{root}/proc/meminfo"), "MemTotal")
    return min([machine, *(group.limit_bytes for group in memory_groups(root=root))])


def _field(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise _no_proc(error) from error
    for line in lines:
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise DeviceError(f"{file} has no {name}: the size of this process cannot be kept within a budget on this kernel")


def _no_proc(error: OSError) -> DeviceError:
    return DeviceError(f"{error.filename}: {error.strerror}; patrickstar needs Linux with /proc mounted")


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group with a memory limit. `used_bytes` leaves out file pages not used of late: the kernel drops them before it refuses memory."""

    directory: Path
    limit_bytes: int
    used_bytes: int

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


def memory_groups(*, root: str = "") -> list[MemoryGroup]:
    """The limited groups this process is in, its own first. Empty where there are none, or no control groups at all.

    Args:
        root: where `/proc` and `/sys` are looked for, for tests.
    """
    own = dict(_own_groups(Path(f"{root}/proc/self/cgroup")))
    found = []
    for version, source, mount in _mounts(Path(f"{root}/proc/self/mountinfo")):
        if version in own:
            top = Path(f"{root}{mount}")
            for directory in _upwards(top, _below(own[version], source)):
                group = _read_v2(directory) if version == 2 else _read_v1(directory)
                if group is not None:
                    found.append(group)
    return found


def _own_groups(file: Path) -> Iterator[tuple[int, str]]:
    """(version, path of the group) of the hierarchies that account memory."""
    for line in lines_of(file):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield 2, path
        elif "memory" in controllers.split(","):
            yield 1, path


def _mounts(file: Path) -> Iterator[tuple[int, str, str]]:
    """(version, root of the mount within its hierarchy, mount point) of the hierarchies that account memory."""
    for line in lines_of(file):
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(" "), after.split(" ", 2)
        if kind == "cgroup2":
            yield 2, _unescape(fields[3]), _unescape(fields[4])
        elif kind == "cgroup" and "memory" in options.split(","):
            yield 1, _unescape(fields[3]), _unescape(fields[4])


def _below(path: str, source: str) -> str:
    """A group's path below a mount of `source`. In a container the mount often starts at the group itself."""
    if source == "/":
        return path.strip("/")
    if path == source or path.startswith(source + "/"):
        return path[len(source) :].strip("/")
    return ""  # named from outside this namespace: what is mounted is all there is to see


def _upwards(top: Path, below: str) -> list[Path]:
    directory = top / below
    if ".." in Path(below).parts or not directory.is_dir():
        directory = top
    return [each for each in (directory, *directory.parents) if each.is_relative_to(top)]


def _read_v2(directory: Path) -> MemoryGroup | None:
    # Above `high` the kernel reclaims and throttles, which is no room to plan with either.
    limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(directory / name)) is not None]
    used = _number(directory / "memory.current")
    if not limits or used is None:
        return None
    return MemoryGroup(directory, min(limits), max(0, used - _statistic(directory, "inactive_file")))


def _read_v1(directory: Path) -> MemoryGroup | None:
    limit, used = _number(directory / "memory.limit_in_bytes"), _number(directory / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= 1 << 62:  # no limit is the largest number of whole pages
        return None
    return MemoryGroup(directory, limit, max(0, used - _statistic(directory, "total_inactive_file")))


def _number(file: Path) -> int | None:
    lines = lines_of(file)
    return int(lines[0]) if lines and lines[0].isdigit() else None  # "max" is none


def _statistic(directory: Path, name: str) -> int:
    return int(dict(line.partition(" ")[::2] for line in lines_of(directory / "memory.stat")).get(name, 0))


def lines_of(file: Path) -> list[str]:
    """The lines of one of the kernel's files; none where it is not there."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _unescape(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path)
