"""memory/disk.py: the disk directory is made, refused with what to do, and known for what it is."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from patrickstar.errors import DeviceError
from patrickstar.memory.disk import expect_usable, free_bytes, kept_in_memory, prepare_directory, remove_stale_files
from tests.faults import Fails, FaultyIO


def test_a_directory_is_made_where_its_parent_exists_and_kept_where_it_does(tmp_path):
    directory = tmp_path / "tier"
    prepare_directory(directory)
    (directory / "file").touch()
    prepare_directory(directory)
    assert (directory / "file").exists()


def test_what_cannot_be_a_directory_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    for path, reason in {
        tmp_path / "no" / "tier": f"{tmp_path / 'no'} is no directory; give one that exists, or whose parent does",
        tmp_path / "file": "is no directory",
        tmp_path / "file" / "tier": "is no directory",
        tmp_path / ("x" * 300): "cannot be looked at: File name too long",
    }.items():
        for use in (prepare_directory, expect_usable, free_bytes):
            with pytest.raises(DeviceError, match=reason) as refusal:
                use(path)
            assert f"disk={str(path)!r}" in str(refusal.value)


@pytest.mark.parametrize("there", [True, False], ids=["is there", "is yet to be made"])
def test_a_directory_is_tried_and_left_as_it_was(tmp_path, there):
    directory = tmp_path / "tier"
    if there:
        directory.mkdir()
    io = FaultyIO()
    expect_usable(directory, io=io)
    assert io.counts == {"open": 1, "fallocate": 1, "unlink": 1, "close": 1}
    assert [path.name for path in tmp_path.rglob("*")] == (["tier"] if there else [])


UNUSABLE = [
    (Fails("open", errno.EACCES), "change its owner or its mode"),
    (Fails("open", errno.EPERM), "change its owner or its mode"),
    (Fails("open", errno.EROFS), "mount it for writing"),
    (Fails("open", errno.ENOSPC), "free space"),
    (Fails("open", errno.EIO), "name another directory"),
    (Fails("fallocate", errno.ENOSPC), "free space"),
    (Fails("fallocate", errno.EDQUOT), "free space"),
]


@pytest.mark.parametrize(("fault", "instead"), UNUSABLE, ids=lambda value: getattr(value, "call", None))
@pytest.mark.parametrize("there", [True, False], ids=["is there", "is yet to be made"])
def test_what_cannot_be_written_is_refused_with_the_reason_and_leaves_nothing(tmp_path, there, fault, instead):
    directory = tmp_path / "tier"
    if there:
        directory.mkdir()
    with pytest.raises(DeviceError) as refusal:
        expect_usable(directory, io=FaultyIO(fault))
    message = str(refusal.value)
    assert message.startswith(f"disk={str(directory)!r}: files cannot be made in {directory if there else tmp_path}: ")
    assert os.strerror(fault.number) in message
    assert instead in message
    assert [path.name for path in tmp_path.rglob("*")] == (["tier"] if there else [])


def test_what_a_pool_has_removed_already_is_well(tmp_path):
    expect_usable(tmp_path, io=FaultyIO(Fails("unlink", errno.ENOENT)))
    (left,) = tmp_path.iterdir()
    assert remove_stale_files(tmp_path) == 1, "what a process that is killed leaves goes with the next pool"
    assert not left.exists()


def test_a_full_disk_is_said_to_be_one(tmp_path, monkeypatch):
    found = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda place: SimpleNamespace(f_bavail=0, f_frsize=found.f_frsize))
    with pytest.raises(DeviceError, match=r"nothing is free in .* \(0 bytes\); free space, or name a directory"):
        expect_usable(tmp_path)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # for root every directory is writable
    with pytest.raises(DeviceError, match="not writable by this user"):
        prepare_directory(tmp_path)


def test_free_space_is_the_users_and_known_before_the_directory_is_made(tmp_path):
    found = os.statvfs(tmp_path)
    for directory in (tmp_path, tmp_path / "later"):
        assert free_bytes(directory) == pytest.approx(found.f_bavail * found.f_frsize, rel=0.1)


@pytest.mark.parametrize(("kind", "expected"), [("tmpfs", True), ("ext4", False)])
def test_a_file_system_in_memory_is_known_by_its_kind(tmp_path, kind, expected):
    device = tmp_path.stat().st_dev
    mounts = f"1 0 0:999 / / rw - {'ext4' if kind == 'tmpfs' else 'tmpfs'} other rw\n"
    mounts += f"2 0 {os.major(device)}:{os.minor(device)} / /x rw shared:1 - {kind} name rw\n"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(mounts)
    assert kept_in_memory(tmp_path, root=str(tmp_path)) is expected
    assert not kept_in_memory(tmp_path, root=str(tmp_path / "nothing here"))
