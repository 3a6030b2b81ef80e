"""The header of a safetensors file, written and read as the format's specification has it.

What every header we accept satisfies (`decode_header` refuses all others):

(1) Its length is at most what the file and the format allow. Otherwise memory is taken for a header that is not there.
(2) Every entry has a known type, a shape of sizes that exist, and exactly the bytes that type and shape take.
(3) The tensors lie back to back from the header's end to the file's: no two share a byte, none is left over, none lies
    outside. So checksums of the header and of each tensor cover every byte of the file.

Layout of a file: 8 bytes, little endian, the length of the header; the header, JSON padded with spaces; the tensors.
Source: https://huggingface.co/docs/safetensors (format); the limit of 100 MB is that library's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from patrickstar.checkpoint.fields import as_int, as_list, as_object, as_shape, as_str, exact_keys, parse_object
from patrickstar.errors import CheckpointError

__all__ = ["ITEMSIZE", "LENGTH_BYTES", "MOST_HEADER_BYTES", "Span", "decode_header", "encode_header", "header_length"]

ITEMSIZE: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
        **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
        **dict.fromkeys(("U32", "I32", "F32"), 4),
        **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
    }
)
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000
_DATA_ALIGNMENT = 64  # so that a reader that maps the file finds the first tensor on a cache line


@dataclass(frozen=True, slots=True)
class Span:
    """Place of one tensor's bytes in its file; `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def encode_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, Span]]:
    """The bytes in front of tensors (name, dtype, shape) that follow in this order, and where each will lie."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # "pt": transformers refuses files without it
    sizes: dict[str, tuple[int, int]] = {}
    at = 0
    for name, dtype, shape in tensors:
        nbytes = ITEMSIZE[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        sizes[name] = (at, nbytes)
        at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-(LENGTH_BYTES + len(text)) % _DATA_ALIGNMENT)
    start = LENGTH_BYTES + len(text)
    spans = {name: Span(dtype, shape, start + sizes[name][0], sizes[name][1]) for name, dtype, shape in tensors}
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, spans


def header_length(start: bytes, *, file_nbytes: int, where: str) -> int:
    """Bytes of the header after the length itself, from the file's first eight bytes (rule 1)."""
    if len(start) < LENGTH_BYTES or file_nbytes < LENGTH_BYTES + 2:
        raise CheckpointError(f"{where}: {file_nbytes} bytes are too few for a safetensors file")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    most = min(file_nbytes - LENGTH_BYTES, MOST_HEADER_BYTES)
    if 2 <= length <= most:
        return length
    # Asked only now: a header of 640 bytes begins with 80 02, as pickles do.
    if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
        raise CheckpointError(
            f"{where}: not a safetensors file; it begins like a pickle (torch.save), which is not read"
        )
    raise CheckpointError(
        f"{where}: header length {length}, but a file of {file_nbytes} bytes has room for {most}: "
        "cut short, or not a safetensors file"
    )


def decode_header(text: bytes | bytearray, *, file_nbytes: int, where: str) -> dict[str, Span]:
    """The place of each tensor, in the order in which tensors lie, from the header's JSON (rules 2 and 3)."""
    if text[:1] != b"{":
        raise CheckpointError(f"{where}: the header is no JSON object: not a safetensors file")
    entries = parse_object(text, where=f"{where}: header")
    for key, value in as_object(entries.pop("__metadata__", {}), f"{where}: header: __metadata__").items():
        as_str(value, f'{where}: header: __metadata__["{key}"]')

    start = LENGTH_BYTES + len(text)
    spans: dict[str, Span] = {}
    for name, entry in entries.items():
        spans[name] = _span(entry, start=start, where=f"{where}: header: {json.dumps(name)}")
    spans = dict(sorted(spans.items(), key=lambda item: (item[1].offset, item[1].end)))
    at, before = start, "the header"
    for name, span in spans.items():
        if span.offset != at:
            how = "overlaps" if span.offset < at else "leaves a hole after"
            raise CheckpointError(f"{where}: tensor {name!r} at byte {span.offset} {how} {before}, which ends at {at}")
        at, before = span.end, f"tensor {name!r}"
    if at != file_nbytes:
        problem = "cut short" if at > file_nbytes else "bytes after the last tensor"
        raise CheckpointError(f"{where}: {file_nbytes} bytes, but its header describes {at}: {problem}")
    return spans


def _span(entry: object, *, start: int, where: str) -> Span:
    fields = exact_keys(entry, where, ("dtype", "shape", "data_offsets"))
    dtype = as_str(fields["dtype"], f"{where}.dtype")
    if dtype not in ITEMSIZE:
        raise CheckpointError(f"{where}.dtype: unknown type {dtype[:40]!r}")
    shape = as_shape(fields["shape"], f"{where}.shape")
    offsets = as_list(fields["data_offsets"], f"{where}.data_offsets")
    if len(offsets) != 2:
        raise CheckpointError(f"{where}.data_offsets: expected two numbers, found {len(offsets)}")
    begin, end = (as_int(offset, f"{where}.data_offsets[{at}]") for at, offset in enumerate(offsets))
    nbytes = ITEMSIZE[dtype] * math.prod(shape)
    if end - begin != nbytes:
        raise CheckpointError(f"{where}: offsets {begin} to {end} are not the {nbytes} bytes of {dtype} {list(shape)}")
    return Span(dtype, shape, start + begin, nbytes)
