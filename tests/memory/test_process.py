"""memory/process.py: sizes of this process, and what it may still take."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from patrickstar.errors import DeviceError
from patrickstar.memory.arena import Arena
from patrickstar.memory.process import available_bytes, peak_resident_bytes, reset_peak, resident_bytes, total_bytes
from patrickstar.units import GIB, KIB, MIB


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(root)


MEMINFO = {"proc/meminfo": "MemTotal:  16777216 kB\nMemFree: 1 kB\nMemAvailable:   8388608 kB\n"}


def test_the_resident_size_follows_what_is_touched_and_the_peak_keeps_it():
    arena = Arena(MIB, virtual_slots=64, name="host")
    first = arena.take(64)
    reset = reset_peak()
    before, peak_before = resident_bytes(), peak_resident_bytes()
    arena.buffer(first, 64)[:] = bytes(64 * MIB)
    filled = resident_bytes()
    arena.give(first, 64)
    arena.trim(0)
    assert filled - before == pytest.approx(64 * MIB, abs=MIB)
    assert resident_bytes() - before == pytest.approx(0, abs=MIB)
    if reset:
        assert peak_before - before == pytest.approx(0, abs=MIB)
    assert peak_resident_bytes() >= filled - MIB
    if reset_peak():
        assert peak_resident_bytes() == pytest.approx(resident_bytes(), abs=MIB)


def test_the_fields_read_are_the_right_ones(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/statm": "9000 700 300 1 0 400 0\n",
            "proc/self/status": "Name:\tpython\nVmPeak:\t  99999 kB\nVmHWM:\t    2048 kB\nVmRSS:\t 1024 kB\n",
            **MEMINFO,
        },
    )
    assert resident_bytes(root=root) == 700 * mmap.PAGESIZE
    assert peak_resident_bytes(root=root) == 2048 * KIB
    assert available_bytes(root=root) == 8 * GIB
    assert total_bytes(root=root) == 16 * GIB


def test_resetting_the_peak_writes_what_the_kernel_asks_for_or_says_it_could_not(tmp_path):
    root = write(tmp_path, {"proc/self/clear_refs": ""})
    assert reset_peak(root=root)
    assert (tmp_path / "proc/self/clear_refs").read_text() == "5"
    assert not reset_peak(root=str(tmp_path / "nothing here"))


def test_without_proc_the_error_says_what_is_needed(tmp_path):
    for read in (resident_bytes, peak_resident_bytes, available_bytes, total_bytes):
        with pytest.raises(DeviceError, match="needs Linux with /proc"):
            read(root=str(tmp_path))
    write(tmp_path, {"proc/self/status": "Name:\tpython\n"})
    with pytest.raises(DeviceError, match="VmHWM"):
        peak_resident_bytes(root=str(tmp_path))


@pytest.mark.parametrize(("limit", "available", "total"), [(4, 3, 4), (40, 8, 16)], ids=["below", "above"])
def test_a_control_group_bounds_what_may_be_taken_where_it_is_below_the_machine(tmp_path, limit, available, total):
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": "31 1 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/job/memory.max": f"{limit * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{GIB}\n",
        },
    )
    assert available_bytes(root=root) == available * GIB
    assert total_bytes(root=root) == total * GIB


def test_this_machine_has_memory_left_and_not_more_than_all():
    assert 0 < available_bytes() <= total_bytes()
