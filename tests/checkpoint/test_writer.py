"""A file written through two blocks: its bytes are those appended, whatever their sizes and whatever the device does."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.checkpoint.staged_files import FileWriter
from patrickstar.errors import DeviceError
from patrickstar.memory.fileio import FileIO, two_blocks
from tests.checkpoint.faults import NotDirect
from tests.faults import FaultyIO, Short

LANE = ThreadPoolExecutor(1)
BLOCKS = two_blocks(4096)


def sluggish() -> FaultyIO:
    """A device that takes a little at a time."""
    return FaultyIO(Short("pwritev", 1000, times=10**6))


@given(sizes=st.lists(st.integers(0, 9000), max_size=6), kind=st.sampled_from([FileIO, NotDirect, sluggish]))
def test_a_file_holds_what_was_appended(tmp_path_factory, sizes, kind):
    path = tmp_path_factory.mktemp("written") / "file"
    data = os.urandom(sum(sizes))
    writer = FileWriter(path, io=kind(), lane=LANE, blocks=BLOCKS)
    at = 0
    for size in sizes:
        piece = bytearray(data[at : at + size])
        writer.append(memoryview(piece))
        piece[:] = bytes(size)  # whoever appended may use the memory again
        at += size
    writer.finish()
    assert path.read_bytes() == data
    assert (writer.nbytes, writer.checksum.hexdigest()) == (len(data), hashlib.sha256(data).hexdigest())


def test_a_device_that_takes_nothing_is_an_error_and_not_a_loop(tmp_path):
    writer = FileWriter(tmp_path / "file", io=FaultyIO(Short("pwritev", 0, times=99)), lane=LANE, blocks=BLOCKS)
    with pytest.raises(DeviceError, match="cannot write 4096 bytes at offset 0: no more bytes"):
        writer.append(memoryview(bytes(9000)))
    writer.abort()
    writer.abort()


def test_an_existing_file_or_link_is_never_written_through(tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("target", "link"):
        with pytest.raises(DeviceError, match="cannot make the file"):
            FileWriter(tmp_path / name, io=FileIO(), lane=LANE, blocks=BLOCKS)
    assert (tmp_path / "target").read_text() == "precious"
