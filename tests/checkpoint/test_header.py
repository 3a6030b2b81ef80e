"""Headers of safetensors files: ours and the library's mean the same."""

from __future__ import annotations

import os
from pathlib import Path

import safetensors.torch
import torch
from hypothesis import given

from patrickstar.checkpoint.tensors import Span, TensorEntry, encode_header, read_header
from patrickstar.memory.fileio import FileIO
from tests.checkpoint.samples import ENTRIES


def spans_of(path: Path) -> dict[str, Span]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(FileIO(), path, fd)
    finally:
        os.close(fd)


@given(entries=ENTRIES)
def test_a_header_reads_back_as_what_was_written_in_the_order_of_bytes(tmp_path_factory, entries):
    path = tmp_path_factory.getbasetemp() / "file"
    header = encode_header(entries)
    path.write_bytes(header + bytes(sum(entry.nbytes for entry in entries)))
    assert len(header) % 64 == 0
    found = spans_of(path)
    offset = len(header)
    for entry in entries:
        assert found[entry.name] == Span(entry.dtype, entry.shape, offset)
        offset += entry.nbytes
    assert list(found.values()) == sorted(found.values(), key=lambda span: span.offset)


def test_our_header_and_the_library_s_are_read_alike(tmp_path):
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.arange(3, dtype=torch.int64), "c": torch.ones(3).bool()}
    theirs = safetensors.torch.save(tensors, metadata={"format": "pt"})
    (tmp_path / "theirs").write_bytes(theirs)
    for name, span in spans_of(tmp_path / "theirs").items():
        assert (span.dtype, span.shape) == (tensors[name].dtype, tuple(tensors[name].shape))
        assert theirs[span.offset :][: tensors[name].nbytes] == tensors[name].numpy().tobytes()

    ours = encode_header([TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()])
    read = safetensors.torch.load(ours + b"".join(tensor.numpy().tobytes() for tensor in tensors.values()))
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
