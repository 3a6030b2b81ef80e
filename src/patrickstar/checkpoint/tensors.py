"""Tensors as safetensors files have them: types by the format's names, memory as bytes, and the header that says what lies where.

Layout of a file: 8 bytes, little endian, the length of the header; the header, JSON padded with spaces; the tensors. A header is written
here, so that tensors can follow piece by piece; it is read and checked by the format's own library.
Source: https://huggingface.co/docs/safetensors (format).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open

from patrickstar.errors import CheckpointError
from patrickstar.memory.fileio import FileIO, read_whole, reported

_LENGTH_BYTES = 8
_DATA_ALIGNMENT = 64  # so that a reader that maps the file finds the first tensor on a cache line
_MOST_NUMEL = 2**63 - 1

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"BOOL": torch.bool, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64}
    | {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
    | {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
    | {"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz}
    | {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64}
)
DTYPE_CODES = MappingProxyType({dtype: code for code, dtype in DTYPES.items()})


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint, before its bytes are known. Those of one stem lie in `STEM-00001-of-00003.safetensors` and so on, no others."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stem: str = "tensors"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Span:
    """Type, shape and place of one tensor; `offset` counts from the start of its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def encode_header(entries: Sequence[TensorEntry]) -> bytes:
    """The bytes in front of tensors that follow in this order."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}  # "pt": transformers refuses files without it
    at = 0
    for entry in entries:
        end = at + entry.nbytes
        fields[entry.name] = {"dtype": DTYPE_CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _DATA_ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(io: FileIO, path: Path, fd: int) -> dict[str, Span]:
    """The tensors of an open file, in the order in which they lie. CheckpointError: it is no safetensors file, or has a type that is not read."""
    try:
        # The file that is open, whatever lies at its path by now. Not as torch's, for which the library would map all of it.
        with safe_open(f"/proc/self/fd/{fd}", framework="numpy"):
            pass
    except (SafetensorError, OSError) as problem:
        begins = bytearray(4)
        with reported(f"{path}: cannot read the file's first bytes", CheckpointError):
            io.preadv(fd, memoryview(begins), 0)
        if begins == b"PK\x03\x04" or begins[:1] == b"\x80":
            raise CheckpointError(
                f"{path}: not a safetensors file; it begins like a pickle (torch.save), which is not read"
            ) from None
        raise CheckpointError(f"{path}: damaged, or not a safetensors file: {problem}") from None
    length = bytearray(_LENGTH_BYTES)
    read_whole(io, path, fd, memoryview(length), 0, error=CheckpointError)
    text = bytearray(int.from_bytes(length, "little"))
    read_whole(io, path, fd, memoryview(text), _LENGTH_BYTES, error=CheckpointError)
    fields = json.loads(text)
    fields.pop("__metadata__", None)
    start = _LENGTH_BYTES + len(text)
    spans: dict[str, Span] = {}
    for name, field in sorted(fields.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = DTYPES.get(field["dtype"])
        if dtype is None:
            raise CheckpointError(f"{path}: tensor {name!r} is of the type {field['dtype']}, which is not read")
        # Empty dims counted as one: torch multiplies the others into strides even where there are no elements.
        if math.prod(max(dim, 1) for dim in field["shape"]) > _MOST_NUMEL:
            raise CheckpointError(f"{path}: tensor {name!r} of {field['shape']} has more elements than any memory")
        spans[name] = Span(dtype, tuple(field["shape"]), start + field["data_offsets"][0])
    return spans


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, as writable bytes; no copy."""
    assert tensor.device.type == "cpu", "only host memory has bytes that a file can take"
    assert tensor.is_contiguous(), "a tensor with strides has no bytes in a row"
    if not tensor.numel():
        return memoryview(bytearray())
    # By way of uint8, because NumPy knows neither bfloat16 nor the 8-bit floats.
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised host memory; an ordinary tensor wherever it is called.

    Whatever default device is set, and not an inference tensor, which autograd could never save nor anybody write.
    """
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device="cpu")
