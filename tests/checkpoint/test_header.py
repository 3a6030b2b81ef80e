"""Headers of safetensors files: ours and the library's mean the same, and no other file gets through."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.checkpoint.header import (
    ITEMSIZE,
    LENGTH_BYTES,
    MOST_HEADER_BYTES,
    Span,
    decode_header,
    encode_header,
    header_length,
)
from patrickstar.checkpoint.tensors import DTYPES
from patrickstar.errors import CheckpointError

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
TENSORS = st.dictionaries(st.text(max_size=8).filter(lambda name: name != "__metadata__"), st.tuples(
    st.sampled_from(sorted(ITEMSIZE)), SHAPES), max_size=6)  # fmt: skip


def test_item_sizes_are_those_of_torch():
    assert {code: dtype.itemsize for code, dtype in DTYPES.items()} == dict(ITEMSIZE)


@given(tensors=TENSORS)
def test_a_header_reads_back_as_what_was_written(tensors):
    rows = [(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
    data, spans = encode_header(rows)
    length = header_length(data[:8], file_nbytes=10**9, where="f")
    assert length == len(data) - LENGTH_BYTES
    end = max((span.end for span in spans.values()), default=len(data))
    assert decode_header(data[LENGTH_BYTES:], file_nbytes=end, where="f") == spans


def test_our_header_and_the_library_s_are_read_alike():
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.arange(3, dtype=torch.int64), "c": torch.ones(3).bool()}
    theirs = safetensors.torch.save(tensors, metadata={"format": "pt"})
    length = header_length(theirs[:8], file_nbytes=len(theirs), where="f")
    spans = decode_header(theirs[8 : 8 + length], file_nbytes=len(theirs), where="f")
    for name, tensor in tensors.items():
        assert spans[name].shape == tuple(tensor.shape)
        assert theirs[spans[name].offset : spans[name].end] == tensor.numpy().tobytes()

    header, ours = encode_header([(name, span.dtype, span.shape) for name, span in spans.items()])
    data = header + b"".join(tensors[name].numpy().tobytes() for name in ours)
    read = safetensors.torch.load(data)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("start", "file_nbytes"),
    [
        (b"", 0),
        (b"\x02", 1),
        (b"\x02" + b"\0" * 7, 9),
        (b"\0" * 8, 100),
        (b"\xff" * 8, 100),
        ((93).to_bytes(8, "little"), 100),
        ((MOST_HEADER_BYTES + 1).to_bytes(8, "little"), 10**12),
        (b"PK\x03\x04....", 1000),
        (b"\x80\x02}q\0.\0\0", 1000),
    ],
)
def test_a_length_that_the_file_has_no_room_for_is_refused(start, file_nbytes):
    with pytest.raises(CheckpointError, match=r"^a file: "):
        header_length(start, file_nbytes=file_nbytes, where="a file")


@pytest.mark.parametrize("length", [0x80, 0x0280, 0x0480])
def test_a_length_that_looks_like_the_start_of_a_pickle_is_a_length(length):
    assert header_length(length.to_bytes(8, "little"), file_nbytes=5000, where="f") == length


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ([1, 2], "no JSON object"),
        ({"a": 1}, "expected an object"),
        ({"a": {**ENTRY, "more": 1}}, "unknown key 'more'"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "key 'data_offsets' is missing"),
        ({"a": {**ENTRY, "dtype": "F33"}}, "unknown type 'F33'"),
        ({"a": {**ENTRY, "dtype": None}}, "expected a string"),
        ({"a": {**ENTRY, "shape": [3]}}, "are not the 12 bytes"),
        ({"a": {**ENTRY, "shape": [2**62]}}, "are not the"),
        ({"a": {**ENTRY, "data_offsets": [0, 4]}}, "are not the 8 bytes"),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, "are not the 8 bytes"),
        ({"a": {**ENTRY, "data_offsets": [0]}}, "expected two numbers"),
        ({"a": {**ENTRY, "data_offsets": [-8, 0]}}, "expected a whole number"),
        ({"a": {**ENTRY, "data_offsets": [4, 12]}}, "leaves a hole"),
        ({"a": ENTRY, "b": ENTRY}, "overlaps"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, "overlaps"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [8, 16]}}, "cut short"),
        ({"a": {**ENTRY, "shape": [1], "data_offsets": [0, 4]}}, "bytes after the last tensor"),
        ({"__metadata__": {"a": 1}, "a": ENTRY}, "expected a string"),
        ({"__metadata__": [], "a": ENTRY}, "expected an object"),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused_by_name(header, problem):
    text = json.dumps(header).encode()
    with pytest.raises(CheckpointError, match=r"^a file: ") as refused:
        decode_header(text, file_nbytes=LENGTH_BYTES + len(text) + 8, where="a file")
    assert problem in str(refused.value)


def test_the_same_name_twice_is_refused():
    text = (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    )
    with pytest.raises(CheckpointError, match="stands twice"):
        decode_header(text, file_nbytes=LENGTH_BYTES + len(text) + 8, where="a file")


@given(data=st.data(), tensors=TENSORS)
def test_a_changed_header_is_refused_or_still_describes_all_bytes(data, tensors):
    header, spans = encode_header([(name, dtype, shape) for name, (dtype, shape) in tensors.items()])
    text = bytearray(header[LENGTH_BYTES:])
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    end = max((span.end for span in spans.values()), default=len(header))
    try:
        found = decode_header(text, file_nbytes=end, where="f")
    except CheckpointError:
        return
    covered = sorted((span.offset, span.end) for span in found.values())
    assert [start for start, _ in covered] == [len(header), *(stop for _, stop in covered)][: len(covered)]
    assert sum(span.nbytes for span in found.values()) == end - len(header)
    assert all(isinstance(span, Span) and span.nbytes == span.numel * ITEMSIZE[span.dtype] for span in found.values())
