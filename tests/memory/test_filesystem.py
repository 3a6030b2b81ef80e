"""memory/filesystem.py: a disk directory is made, refused with what to do, and known for what it is."""

from __future__ import annotations

import os

import pytest

from patrickstar.errors import DeviceError
from patrickstar.memory.filesystem import default_disk_bytes, free_bytes, kept_in_memory, prepare_directory


def test_a_directory_is_made_where_its_parent_exists_and_kept_where_it_does(tmp_path):
    directory = tmp_path / "tier"
    prepare_directory(directory)
    (directory / "file").touch()
    prepare_directory(directory)
    assert (directory / "file").exists()


def test_what_cannot_be_a_directory_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    for path, reason in {
        tmp_path / "no" / "tier": f"the parent {tmp_path / 'no'} does not exist; make it",
        tmp_path / "file": "not a directory",
        tmp_path / "file" / "tier": "not a directory",
        tmp_path / ("x" * 300): "cannot be made: File name too long",
    }.items():
        with pytest.raises(DeviceError, match=reason):
            prepare_directory(path)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # for root every directory is writable
    with pytest.raises(DeviceError, match="not writable by this user"):
        prepare_directory(tmp_path)


def test_free_space_is_the_users_and_known_before_the_directory_is_made(tmp_path):
    found = os.statvfs(tmp_path)
    for directory in (tmp_path, tmp_path / "later"):
        assert free_bytes(directory) == pytest.approx(found.f_bavail * found.f_frsize, rel=0.1)
        assert default_disk_bytes(directory) == pytest.approx(free_bytes(directory) * 0.9, rel=0.1)
    with pytest.raises(DeviceError, match="name another directory"):
        free_bytes(tmp_path / "no" / "tier")


@pytest.mark.parametrize(("kind", "expected"), [("tmpfs", True), ("ext4", False)])
def test_a_file_system_in_memory_is_known_by_its_kind(tmp_path, kind, expected):
    device = tmp_path.stat().st_dev
    mounts = f"1 0 0:999 / / rw - {'ext4' if kind == 'tmpfs' else 'tmpfs'} other rw\n"
    mounts += f"2 0 {os.major(device)}:{os.minor(device)} / /x rw shared:1 - {kind} name rw\n"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(mounts)
    assert kept_in_memory(tmp_path, root=str(tmp_path)) is expected
    assert not kept_in_memory(tmp_path, root=str(tmp_path / "nothing here"))
