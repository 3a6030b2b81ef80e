"""Reading through aligned blocks: the bytes asked for, at any offset, whatever the device does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.checkpoint.tensor_files import Source, open_file
from patrickstar.errors import CheckpointError
from patrickstar.memory.fileio import FileIO, two_blocks
from tests.checkpoint.faults import NotDirect

BLOCKS = two_blocks(8192)
DATA = random.Random(5).randbytes(50_001)


class Sluggish(FileIO):
    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        return super().preadv(fd, buffer[: random.Random(offset).randrange(1, 3000)], offset)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "file"
    path.write_bytes(DATA)
    return path


def opened(path: Path, io: FileIO) -> Source:
    return Source(path, open_file(path, io)[0], io=io, blocks=BLOCKS)


@given(
    offset=st.integers(0, len(DATA)), nbytes=st.integers(0, 30_000), kind=st.sampled_from([FileIO, NotDirect, Sluggish])
)
def test_any_part_is_read_and_streamed_as_it_lies_there(path, offset, nbytes, kind):
    nbytes = min(nbytes, len(DATA) - offset)
    source = opened(path, kind())
    out = bytearray(nbytes)
    source.read_into(memoryview(out), offset)
    streamed = b"".join(bytes(view) for view in source.stream(nbytes))
    source.close()
    assert bytes(out) == DATA[offset : offset + nbytes]
    assert streamed == DATA[:nbytes]


@pytest.mark.parametrize(("offset", "nbytes"), [(len(DATA), 1), (len(DATA) - 1, 2), (0, len(DATA) + 1), (10**6, 9000)])
def test_bytes_past_the_end_are_an_error_with_the_offset(path, offset, nbytes):
    source = opened(path, FileIO())
    with pytest.raises(CheckpointError, match=r"file: cannot read \d+ bytes at offset \d+: no more bytes"):
        source.read_into(memoryview(bytearray(nbytes)), offset)
    with pytest.raises(CheckpointError, match="no more bytes"):
        list(source.stream(offset + nbytes))
    source.close()


def test_a_view_holds_until_the_next_is_asked_for_and_a_stream_may_be_given_up(path):
    source = opened(path, FileIO())
    views = source.stream(len(DATA))
    for at in (0, 8192, 16384):
        assert bytes(next(views)) == DATA[at : at + 8192]
    views.close()
    source.close()
