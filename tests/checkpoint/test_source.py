"""Reading through aligned blocks: the bytes asked for, at any offset, whatever the device does."""

from __future__ import annotations

import errno
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.checkpoint.files import Blocks, Files
from patrickstar.checkpoint.source import Source
from patrickstar.errors import CheckpointError

LANE = ThreadPoolExecutor(1)
BLOCKS = Blocks(8192)
DATA = random.Random(5).randbytes(50_001)


class NotDirect(Files):
    """A file system that takes the flag and then refuses what is not aligned as it wants it."""

    def __init__(self) -> None:
        self.direct = True

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        if self.direct:
            raise OSError(errno.EINVAL, "not aligned")
        return super().read(descriptor, buffer, offset)

    def leave_direct(self, descriptor: int) -> bool:
        super().leave_direct(descriptor)
        before, self.direct = self.direct, False
        return before


class Sluggish(Files):
    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        return super().read(descriptor, buffer[: random.Random(offset).randrange(1, 3000)], offset)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "file"
    path.write_bytes(DATA)
    return path


def opened(path: Path, files: Files) -> Source:
    return Source(path, files.open(path, direct=True)[0], files=files, blocks=BLOCKS)


@given(
    offset=st.integers(0, len(DATA)), nbytes=st.integers(0, 30_000), kind=st.sampled_from([Files, NotDirect, Sluggish])
)
def test_any_part_is_read_and_streamed_as_it_lies_there(path, offset, nbytes, kind):
    nbytes = min(nbytes, len(DATA) - offset)
    source = opened(path, kind())
    out = bytearray(nbytes)
    source.read_into(memoryview(out), offset)
    streamed = b"".join(bytes(view) for view in source.stream(offset, nbytes, lane=LANE))
    source.close()
    assert bytes(out) == streamed == DATA[offset : offset + nbytes]


@pytest.mark.parametrize(("offset", "nbytes"), [(len(DATA), 1), (len(DATA) - 1, 2), (0, len(DATA) + 1), (10**6, 9000)])
def test_bytes_past_the_end_are_an_error_with_the_offset(path, offset, nbytes):
    source = opened(path, Files())
    with pytest.raises(CheckpointError, match=r"file: cannot read \d+ bytes at offset \d+: the file ends before that"):
        source.read_into(memoryview(bytearray(nbytes)), offset)
    with pytest.raises(CheckpointError, match="the file ends before that"):
        list(source.stream(offset, nbytes, lane=LANE))
    source.close()


def test_a_view_holds_while_the_next_one_is_read(path):
    source = opened(path, Files())
    views = source.stream(0, len(DATA), lane=LANE)
    held = next(views)
    following = next(views)
    assert bytes(held) == DATA[: len(held)]
    assert bytes(following) == DATA[len(held) : len(held) + len(following)]
    views.close()
    source.close()
    source.close()
