"""memory/disk.py: whole transfers or an error that names file, offset and bytes; and no file stays behind."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from patrickstar.core.planes import PlaneRef
from patrickstar.errors import BudgetError, DeviceError, StateError
from patrickstar.memory.disk import DiskPool, remove_stale_files
from patrickstar.memory.fileio import ALIGNMENT, FileIO
from patrickstar.memory.mapping import reserve
from patrickstar.units import MIB
from tests.faults import Fails, FaultyIO, Short
from tests.forked import in_forked_child
from tests.memory.light import PRELUDE, run

KIB64 = 64 << 10
UNITS = {
    PlaneRef(0, "weight"): 3 * KIB64,
    PlaneRef(3, "exp_avg"): KIB64,
    PlaneRef(3, "weight"): ALIGNMENT,
    PlaneRef(0, "exp_avg"): 2 * KIB64,
}
FIRST = PlaneRef(0, "weight")


def page_aligned(content: bytes) -> memoryview:
    buffer = memoryview(reserve(len(content))).cast("B")
    buffer[:] = content
    return buffer


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def pool_in(directory: Path, io: FileIO | None = None, **options: object) -> DiskPool:
    return DiskPool(directory, **{"units": UNITS, "budget_bytes": 1 << 40, "io": io, **options})


def written(pool: DiskPool, ref: PlaneRef, content: bytes) -> None:
    pool.writing(ref, page_aligned(content))()


def read(pool: DiskPool, ref: PlaneRef) -> bytes:
    buffer = page_aligned(b"\xee" * pool.extent(ref).nbytes)
    pool.reading(ref, buffer)()
    return bytes(buffer)


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def open_in(directory: Path) -> list[str]:
    """Files below a directory, removed ones too, that this process has open."""
    descriptors = [Path("/proc/self/fd") / name for name in left_in(Path("/proc/self/fd"))]
    targets = [str(descriptor.readlink()) for descriptor in descriptors if descriptor.is_symlink()]
    return [target for target in targets if target.startswith(str(directory))]


class Buffered(FaultyIO):
    """A file system without direct I/O."""

    def __init__(self, *faults: Fails | Short) -> None:
        super().__init__(Fails("set_direct", errno.EINVAL, times=1000), *faults)


class Takes(FaultyIO):
    """A file system that takes the flag and refuses the transfer."""

    def __init__(self) -> None:
        super().__init__(Fails("pwritev", errno.EINVAL))


# Transfers


@pytest.mark.parametrize("make_io", [FileIO, FaultyIO, Buffered, Takes])
def test_every_unit_comes_back_as_it_was_written(tmp_path, make_io):
    pool = pool_in(tmp_path, make_io())
    contents = {ref: noise(size, seed) for seed, (ref, size) in enumerate(UNITS.items())}
    for ref, content in contents.items():
        written(pool, ref, content)
    assert {ref: read(pool, ref) for ref in reversed(UNITS)} == contents
    contents[FIRST] = noise(UNITS[FIRST], 99)
    written(pool, FIRST, contents[FIRST])
    assert {ref: read(pool, ref) for ref in UNITS} == contents


def test_what_was_never_written_reads_as_zeros(tmp_path):
    pool = pool_in(tmp_path)
    assert {bytes(read(pool, ref)).strip(b"\0") for ref in UNITS} == {b""}


def test_a_large_unit_moves_in_blocks(tmp_path):
    io, content = FaultyIO(), noise(20 * MIB)
    pool = pool_in(tmp_path, io, units={FIRST: len(content)})
    before = io.counts["pwritev"]
    written(pool, FIRST, content)
    assert read(pool, FIRST) == content
    assert (io.counts["pwritev"] - before, io.counts["preadv"]) == (3, 3)  # of at most 8 MiB


def test_extents_are_aligned_and_apart_and_files_are_the_owners_one_for_each_plane(tmp_path):
    pool = pool_in(tmp_path)
    extents = sorted((pool.extent(ref) for ref in UNITS), key=lambda extent: (extent.file.path, extent.offset))
    for one, following in itertools.pairwise(extents):
        assert one.file.path != following.file.path or one.offset + one.nbytes <= following.offset
    assert all(extent.offset % ALIGNMENT == 0 for extent in extents)
    assert sorted(path.suffix for path in pool._files) == [".exp_avg", ".weight"]
    assert sum(path.stat().st_size for path in pool._files) == pool.nbytes == sum(UNITS.values())
    assert {path.stat().st_mode & 0o777 for path in pool._files} == {0o600}
    assert all(path.stat().st_blocks * 512 >= path.stat().st_size for path in pool._files)  # preallocated
    flags = {fcntl.fcntl(extent.file.fd, fcntl.F_GETFL) & os.O_DIRECT for extent in extents}
    assert flags == ({os.O_DIRECT} if pool.direct else {0})


def test_units_lie_in_the_order_in_which_they_are_first_used_and_stay_there(tmp_path):
    pool = pool_in(tmp_path)
    last, first = PlaneRef(0, "weight"), PlaneRef(3, "weight")
    written(pool, first, noise(ALIGNMENT))
    assert read(pool, last) == bytes(3 * KIB64)
    assert [pool.extent(ref).offset for ref in (first, last)] == [0, ALIGNMENT]
    assert read(pool, first) == noise(ALIGNMENT)
    pool.add({first: 2 * ALIGNMENT})
    pool.take(first)
    written(pool, first, noise(2 * ALIGNMENT))
    assert pool.extent(first).file.path != pool.extent(last).file.path
    assert pool.extent(last).offset == ALIGNMENT


@pytest.mark.parametrize(
    "faults",
    [
        [Fails("pwritev", errno.EINTR, times=5), Fails("preadv", errno.EINTR, times=5)],
        [Short("pwritev", ALIGNMENT, times=1000), Short("preadv", ALIGNMENT, times=1000)],
        [Short("pwritev", 5000, times=1000), Short("preadv", 9999, times=1000)],
    ],
    ids=["interrupted", "short", "short within a block"],
)
@pytest.mark.parametrize("io_type", [FaultyIO, Buffered])
def test_interrupted_and_short_transfers_are_continued(tmp_path, io_type, faults):
    io, content = io_type(), noise(UNITS[FIRST])
    pool = pool_in(tmp_path, io)
    io.counts.clear()
    io.faults = list(faults)
    # The kernel itself refuses a direct request within a block; that one comes up short there is what is played here.
    for fd in {pool.extent(ref).file.fd for ref in UNITS}:
        io.set_buffered(fd)
    written(pool, FIRST, content)
    assert read(pool, FIRST) == content
    assert set(faults) <= set(io.hit)


@pytest.mark.parametrize(
    ("doing", "fault", "reason"),
    [
        ("write", Fails("pwritev", errno.ENOSPC, nth=4), "No space left on device; free space there"),
        ("write", Fails("pwritev", errno.EIO, nth=4), "Input/output error; the disk does not do its work"),
        ("read", Fails("preadv", errno.EIO, nth=2), "Input/output error; the disk does not do its work"),
        ("read", Short("preadv", 0, nth=2), "no more bytes, as at the file's end"),
    ],
)
def test_a_failed_transfer_names_file_offset_and_bytes_and_spoils_nothing_else(tmp_path, doing, fault, reason):
    ref = PlaneRef(0, "exp_avg")
    # A short first block, so that there is a second one that fails.
    blocks = [Short("pwritev", KIB64, nth=3), Short("preadv", KIB64)]
    io, content = FaultyIO(), noise(UNITS[ref])
    pool = pool_in(tmp_path, io)
    assert pool.extent(PlaneRef(3, "exp_avg")).offset == 0
    source, other = page_aligned(content), noise(KIB64, 5)
    if doing == "read":
        pool.writing(ref, source)()
    io.counts["pwritev"] = 2
    io.faults = [fault, *blocks]
    work = pool.writing(ref, source) if doing == "write" else pool.reading(ref, page_aligned(bytes(UNITS[ref])))
    extent = pool.extent(ref)
    expected = f"{extent.file.path}: cannot {doing} {KIB64} bytes at offset {extent.offset + KIB64}: {reason}"
    with pytest.raises(DeviceError, match=re.escape(expected)):
        work()
    assert fault in io.hit
    assert bytes(source) == content
    io.faults = []
    written(pool, PlaneRef(3, "exp_avg"), other)
    pool.writing(ref, source)()  # once the device is well again
    assert read(pool, ref) == content
    assert read(pool, PlaneRef(3, "exp_avg")) == other


def test_what_does_not_fit_its_unit_is_our_own_mistake(tmp_path):
    pool = pool_in(tmp_path)
    with pytest.raises(ValueError, match="the buffer 4096"):
        pool.reading(FIRST, page_aligned(bytes(ALIGNMENT)))
    with pytest.raises(KeyError):
        pool.reading(PlaneRef(77, "weight"), page_aligned(bytes(ALIGNMENT)))
    with pytest.raises(ValueError, match="multiple of 4096"):
        pool_in(tmp_path, units={FIRST: ALIGNMENT + 512})


# Making a pool


def test_a_budget_too_small_is_refused_with_numbers_before_a_file_is_made(tmp_path):
    with pytest.raises(BudgetError, match=r"disk_memory >= 388.00 KiB") as refusal:
        pool_in(tmp_path, budget_bytes=KIB64)
    error = refusal.value
    assert (error.tier, error.needed_bytes, error.available_bytes) == ("disk", sum(UNITS.values()), KIB64)
    assert error.smallest_bytes == error.needed_bytes
    assert left_in(tmp_path) == []
    pool_in(tmp_path, budget_bytes=error.smallest_bytes).close()


def test_more_than_is_free_there_is_refused(tmp_path):
    units = {FIRST: 1 << 60}
    with pytest.raises(DeviceError, match="are free; free"):
        pool_in(tmp_path, units=units, budget_bytes=1 << 60)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fails("fallocate", errno.ENOSPC, nth=2), "cannot set 196608 bytes aside .*No space left on device"),
        (Fails("open", errno.EACCES), "Permission denied"),
        (Fails("open", errno.EROFS, nth=2), "Read-only file system"),
        (Fails("set_direct", errno.EIO), "cannot set direct I/O up"),
        (Fails("pwritev", errno.EIO, nth=2), "cannot set direct I/O up"),
    ],
)
def test_a_pool_that_cannot_be_made_leaves_nothing(tmp_path, fault, reason):
    with pytest.raises(DeviceError, match=reason):
        pool_in(tmp_path, FaultyIO(fault))
    assert open_in(tmp_path) == []
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("first", [{}, UNITS], ids=["empty at first", "not empty"])
@pytest.mark.parametrize("make_io", [Buffered, Takes])
def test_a_file_system_without_direct_transfers_is_announced_once(tmp_path, caplog, make_io, first):
    with caplog.at_level(logging.WARNING, logger="patrickstar"):
        pool = pool_in(tmp_path, make_io(), units=first)
        assert first or not caplog.messages
        pool.add(UNITS)
        for ref in UNITS:
            pool.take(ref)
    messages = [record.message for record in caplog.records if "direct I/O" in record.message]
    assert len(messages) == 1
    assert str(tmp_path) in messages[0]
    assert not pool.direct
    for extent in map(pool.extent, UNITS):
        assert not fcntl.fcntl(extent.file.fd, fcntl.F_GETFL) & os.O_DIRECT


def test_a_disk_that_is_memory_is_announced(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("patrickstar.memory.disk.kept_in_memory", lambda directory: True)
    with caplog.at_level(logging.WARNING, logger="patrickstar"):
        pool_in(tmp_path)
    assert any("is memory itself" in record.message for record in caplog.records)


def test_without_locks_a_pool_works_and_nothing_is_taken_for_stale(tmp_path):
    no_locks = Fails("lock", errno.ENOLCK, times=1000)
    pool = pool_in(tmp_path, FaultyIO(no_locks))
    assert remove_stale_files(tmp_path, io=FaultyIO(no_locks)) == 0
    written(pool, FIRST, noise(UNITS[FIRST]))
    assert len(left_in(tmp_path)) == 2


def test_a_file_that_was_taken_for_stale_while_it_was_made_is_made_anew(tmp_path):
    class Raced(FileIO):
        races = 2

        def lock(self, fd: int) -> bool:
            if self.races:
                self.races -= 1
                if self.races:  # the other has removed the file and gone
                    remove_stale_files(tmp_path)
                else:  # the other has the lock still
                    return False
            return super().lock(fd)

    pool = pool_in(tmp_path, Raced(), units={FIRST: UNITS[FIRST]})
    written(pool, FIRST, noise(UNITS[FIRST]))
    assert read(pool, FIRST) == noise(UNITS[FIRST])
    assert pool.extent(FIRST).file.path.exists()


# Units that come later


LATER = {PlaneRef(3, "grad"): KIB64, PlaneRef(0, "grad"): 2 * KIB64}


@pytest.mark.parametrize("units", [{}, UNITS], ids=["to none", "to some"])
def test_units_that_come_later_have_room_beside_the_others(tmp_path, units):
    pool = pool_in(tmp_path, units=units, budget_bytes=sum(units.values()) + sum(LATER.values()))
    before = {ref: noise(size, seed) for seed, (ref, size) in enumerate(units.items())}
    for ref, content in before.items():
        written(pool, ref, content)
    pool.add(LATER)
    for ref in LATER:
        pool.take(ref)
    after = {ref: noise(size, 50 + seed) for seed, (ref, size) in enumerate(LATER.items())}
    for ref, content in after.items():
        written(pool, ref, content)
    assert {ref: read(pool, ref) for ref in (*units, *LATER)} == before | after
    with pytest.raises(BudgetError) as refused:
        pool.add({PlaneRef(5, "grad"): ALIGNMENT})
    assert refused.value.needed_bytes - refused.value.available_bytes == ALIGNMENT
    pool.close()
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("fault", [Fails("open", errno.EACCES, nth=3), Fails("fallocate", errno.ENOSPC, nth=4)])
def test_units_that_cannot_come_leave_everything_as_it_was(tmp_path, fault):
    pool = pool_in(tmp_path, FaultyIO(fault))
    written(pool, FIRST, noise(UNITS[FIRST]))
    files, nbytes = left_in(tmp_path), pool.nbytes
    with pytest.raises(DeviceError):
        pool.add(LATER | {PlaneRef(7, "exp_avg"): KIB64})
    assert (left_in(tmp_path), pool.nbytes) == (files, nbytes)
    assert len(open_in(tmp_path)) == len(files)
    assert read(pool, FIRST) == noise(UNITS[FIRST])
    pool.add(LATER)
    for ref in LATER:
        pool.take(ref)
    written(pool, next(iter(LATER)), noise(KIB64))
    assert read(pool, next(iter(LATER))) == noise(KIB64)


# The end of a pool


def test_close_removes_the_files_and_later_calls_say_so(tmp_path):
    pool = pool_in(tmp_path / "tier")
    (tmp_path / "tier" / "mine").touch()
    assert len(open_in(tmp_path)) == 2
    pool.close()
    pool.close()
    assert left_in(tmp_path / "tier") == ["mine"]
    assert open_in(tmp_path) == []
    with pytest.raises(StateError, match="closed"):
        pool.reading(FIRST, page_aligned(bytes(UNITS[FIRST])))


def test_a_pool_that_is_collected_removes_its_files(tmp_path):
    pool = pool_in(tmp_path)
    written(pool, FIRST, noise(UNITS[FIRST]))
    assert len(left_in(tmp_path)) == 2
    del pool
    assert left_in(tmp_path) == []


def test_a_file_that_cannot_be_removed_is_named(tmp_path, caplog):
    pool = pool_in(tmp_path, FaultyIO(Fails("unlink", errno.EACCES)))
    path, *_ = pool._files
    with caplog.at_level(logging.WARNING, logger="patrickstar"):
        pool.close()
    assert [record.message for record in caplog.records] == [
        f"{path}: cannot be removed: Permission denied; remove it by hand"
    ]
    assert left_in(tmp_path) == [path.name]


MAKE = """
import os, signal, sys
from pathlib import Path
from patrickstar.core.planes import PlaneRef
from patrickstar.memory.disk import DiskPool
pool = DiskPool(Path({directory!r}), units={{PlaneRef(0, "weight"): 4096, PlaneRef(0, "grad"): 4096}}, budget_bytes=8192)
print(len(pool._files), flush=True)
"""


def test_the_files_are_gone_when_the_interpreter_ends(tmp_path):
    assert run(MAKE.format(directory=str(tmp_path))) == "2\n"
    assert left_in(tmp_path) == []


def test_a_forked_child_that_ends_leaves_its_parents_files(tmp_path):
    pool = pool_in(tmp_path)
    written(pool, FIRST, noise(UNITS[FIRST]))
    assert in_forked_child(lambda: str(pool.close())) == "None"
    assert len(left_in(tmp_path)) == 2
    assert read(pool, FIRST) == noise(UNITS[FIRST])


def test_what_a_killed_process_left_goes_with_the_next_pool_and_a_living_ones_stays(tmp_path):
    (tmp_path / "patrickstar-notes").write_text("of somebody else")
    code = PRELUDE + MAKE.format(directory=str(tmp_path)) + "sys.stdin.read()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "2\n"
        living = pool_in(tmp_path)  # looks for stale files, and finds them in use
        assert len(left_in(tmp_path)) == 5
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(left_in(tmp_path)) == 5
    another = pool_in(tmp_path)
    names = {path.name for path in (*living._files, *another._files)}
    assert set(left_in(tmp_path)) == names | {"patrickstar-notes"}
    assert remove_stale_files(tmp_path) == 0
