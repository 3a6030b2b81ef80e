"""memory/fileio.py and testing/faults.py: one contract for the real calls and for those that fail on demand."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from patrickstar.errors import CheckpointError, DeviceError
from patrickstar.memory.fileio import FileIO, reported
from patrickstar.memory.mapping import reserve
from tests.faults import Fails, FaultyIO, Short

PAGE = 4096
IO = pytest.mark.parametrize(
    "io",
    [FileIO(), FaultyIO(), FaultyIO(Fails("preadv", errno.EIO, nth=1000))],
    ids=["real", "fails never", "fails later"],
)


def page(fill: int) -> memoryview:
    buffer = memoryview(reserve(PAGE)).cast("B")
    buffer[:] = bytes([fill]) * PAGE
    return buffer


@pytest.fixture
def file(tmp_path):
    return tmp_path / "file"


def made(io, file):
    return io.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)


@IO
def test_what_was_written_is_read_and_the_end_of_the_file_reads_nothing(io, file):
    fd, target = made(io, file), page(0)
    assert io.pwritev(fd, page(7), PAGE) == PAGE
    assert io.preadv(fd, target, PAGE) == PAGE
    assert bytes(target) == bytes(page(7))
    assert io.preadv(fd, target, 2 * PAGE) == 0
    assert io.preadv(fd, target, 2 * PAGE - 100) == 100  # a short transfer
    io.fsync(fd)
    io.close(fd)


@IO
def test_a_file_is_made_once_and_for_its_owner_only(io, file):
    io.close(made(io, file))
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        made(io, file)
    io.unlink(file)
    assert not file.exists()
    with pytest.raises(FileNotFoundError):
        io.open(file, os.O_RDWR)


@IO
def test_what_is_set_aside_has_its_size_and_reads_as_zeros(io, file):
    fd, target = made(io, file), page(7)
    io.fallocate(fd, 0, 3 * PAGE)
    assert os.fstat(fd).st_size == 3 * PAGE
    assert io.preadv(fd, target, 2 * PAGE) == PAGE
    assert not any(target)
    io.close(fd)


@IO
def test_a_lock_keeps_out_whoever_opens_the_file_again_until_it_is_closed(io, file):
    owner = made(io, file)
    other = io.open(file, os.O_RDWR)
    assert io.lock(owner)
    assert not io.lock(other)
    io.close(owner)
    assert io.lock(other)
    io.close(other)


@IO
def test_direct_transfers_and_back(io, file):
    fd = made(io, file)
    try:
        io.set_direct(fd)
        io.pwritev(fd, page(3), 0)
    except OSError as error:
        reason = error.errno
    else:
        reason = 0
    if reason == errno.EINVAL:
        pytest.skip("no direct I/O on this file system")
    assert reason == 0
    with pytest.raises(OSError, match="Invalid argument"):
        io.pwritev(fd, page(3)[:100], 0)
    assert io.set_buffered(fd)
    assert not io.set_buffered(fd)
    assert io.pwritev(fd, page(4)[:100], 0) == 100
    io.close(fd)


USES = {
    "open": lambda io, fd, file: io.open(file, os.O_RDWR),
    "close": lambda io, fd, file: io.close(os.dup(fd)),
    "lock": lambda io, fd, file: io.lock(fd),
    "unlock": lambda io, fd, file: io.unlock(fd),
    "fallocate": lambda io, fd, file: io.fallocate(fd, 0, PAGE),
    "set_direct": lambda io, fd, file: io.set_direct(fd),
    "set_buffered": lambda io, fd, file: io.set_buffered(fd),
    "preadv": lambda io, fd, file: io.preadv(fd, page(0), 0),
    "pwritev": lambda io, fd, file: io.pwritev(fd, page(0), 0),
    "truncate": lambda io, fd, file: io.truncate(fd, 0),
    "fsync": lambda io, fd, file: io.fsync(fd),
    "unlink": lambda io, fd, file: io.unlink(file),
    "status": lambda io, fd, file: io.status(file),
    "names": lambda io, fd, file: io.names(file.parent),
    "free_bytes": lambda io, fd, file: io.free_bytes(file.parent),
    "make_directory": lambda io, fd, file: io.make_directory(file.with_name("more")),
    "remove_directory": lambda io, fd, file: io.remove_directory(file.parent),
    "sync_directory": lambda io, fd, file: io.sync_directory(file.parent),
    "rename": lambda io, fd, file: io.rename(file, file.with_name("other")),
}


def test_the_table_has_every_call():
    assert USES.keys() == {call for call in vars(FileIO) if not call.startswith("_")}


@pytest.mark.parametrize("call", USES)
def test_every_call_fails_when_told(call, file):
    fd = os.open(file, os.O_RDWR | os.O_CREAT)
    io = FaultyIO(Fails(call, errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        USES[call](io, fd, file)
    assert io.counts[call] == len(io.hit) == 1
    assert list(file.parent.iterdir()) == [file]
    os.close(fd)


@IO
def test_names_and_directories(io, tmp_path):
    io.make_directory(tmp_path / "b")
    (tmp_path / "a").write_text("old")
    (tmp_path / "b" / "new").write_text("new")
    assert io.names(tmp_path) == ["a", "b"]
    io.rename(tmp_path / "b" / "new", tmp_path / "a")
    assert (tmp_path / "a").read_text() == "new"
    io.sync_directory(tmp_path)
    io.remove_directory(tmp_path / "b")
    assert io.status(tmp_path / "b") is None
    assert io.status(tmp_path / "a" / "below") is None
    (tmp_path / "link").symlink_to("a")
    assert stat.S_ISLNK(io.status(tmp_path / "link").st_mode)
    with pytest.raises(OSError, match="symbolic link"):
        io.open(tmp_path / "link", os.O_RDONLY)
    assert io.free_bytes(tmp_path) > 0


@pytest.mark.parametrize("error", [CheckpointError, DeviceError])
def test_an_error_says_what_why_and_what_to_change(error):
    for number, advice in {errno.ENOSPC: "free space there", errno.EIO: "see the kernel log", errno.ENOENT: ""}.items():
        with (
            pytest.raises(error, match=f"^x: cannot y: {os.strerror(number)}.*{advice}"),
            reported("x: cannot y", error),
        ):
            raise OSError(number, os.strerror(number))


def test_a_fault_strikes_at_its_turns_only(file):
    io = FaultyIO(Fails("pwritev", errno.EINTR, nth=2, times=2), Short("preadv", 100, nth=2))
    fd = made(io, file)
    assert io.pwritev(fd, page(1), 0) == PAGE
    for _ in range(2):
        with pytest.raises(InterruptedError):
            io.pwritev(fd, page(2), 0)
    assert io.pwritev(fd, page(3), 0) == PAGE
    target = page(0)
    assert [io.preadv(fd, target, 0) for _ in range(3)] == [PAGE, 100, PAGE]
    io.close(fd)
