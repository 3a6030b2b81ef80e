"""Small checkpoints to write, to read back, and to spoil."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st

from patrickstar.checkpoint import staged_files, storage
from patrickstar.checkpoint.format import seal
from patrickstar.checkpoint.reader import StepReader
from patrickstar.checkpoint.tensors import DTYPES, TensorEntry

ENTRIES = st.lists(
    st.builds(
        TensorEntry,
        name=st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        dtype=st.sampled_from(list(DTYPES.values())),
        shape=st.lists(st.integers(0, 6), max_size=4).map(tuple),
        stem=st.sampled_from(["weights", "moments"]),
    ),
    unique_by=lambda entry: entry.name,
    max_size=12,
)
"""Tensors of files, of any names, types and shapes."""
SHARD_BYTES = 10_368  # two files for the weights
PIECE_NUMEL = 700  # neither a whole block nor a whole tensor


def sample(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of several types, sizes and ranks; two seeds differ in every tensor that has elements."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "steps": torch.tensor(1000 + seed),
        "wte.weight": torch.randn(40, 64, generator=draw),
        "flags": torch.rand(13, generator=draw) < 0.5,
        "ln.bias": torch.randn(7, generator=draw).bfloat16(),
        "none": torch.empty(0, 4),
        "exp_avg/wte.weight": torch.randn(40, 64, generator=draw).double(),
        "counts": torch.randint(0, 99, (3, 5), generator=draw),
    }


def entries_of(tensors: Mapping[str, torch.Tensor]) -> list[TensorEntry]:
    return [
        TensorEntry(name, tensor.dtype, tuple(tensor.shape), "moments" if "/" in name else "weights")
        for name, tensor in tensors.items()
    ]


def in_pieces(tensor: torch.Tensor, numel: int = PIECE_NUMEL) -> Iterator[torch.Tensor]:
    """The elements in order, each time in the same memory, as a slot that is used again."""
    slot = torch.empty(numel, dtype=tensor.dtype)
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), numel):
        part = flat[start : start + numel]
        slot[: part.numel()] = part
        yield slot[: part.numel()]
        slot.fill_(1)


def write(directory: Path, step: int, tensors: Mapping[str, torch.Tensor] | None = None, **options: Any) -> Path:
    """A checkpoint of `sample(step)`, in small files and small blocks."""
    tensors = sample(step) if tensors is None else tensors
    options.setdefault("extra", {"epoch": step, "order": torch.arange(step, step + 5), "betas": (0.9, 0.999)})
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if "." in name and "/" not in name}
    options = {"state": {"lr": 1e-3}, "read": lambda name: in_pieces(tensors[name]), "parameters": shapes, **options}
    with mock.patch.object(storage, "SHARD_BYTES", SHARD_BYTES), mock.patch.object(staged_files, "BLOCK_BYTES", 4096):
        return storage.write_step(directory, step, entries=entries_of(tensors), **options)


def contents(reader: StepReader) -> dict[str, torch.Tensor]:
    return {name: reader.read(name) for name in reader.spans}


def same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_tensor(one[name], other[name]) for name in one)


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.numel() == 0 or torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def flip(path: Path, at: int = -1) -> None:
    """Another bit of one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def resize(path: Path, to: float) -> None:
    """As many times the bytes, and one more where it grows."""
    os.truncate(path, int(path.stat().st_size * to) + (to > 1))


def forge(step: Path, change: Any) -> None:
    """Change the index as somebody would who knows how its checksum is made."""
    path = step / "index.json"
    index = json.loads(path.read_bytes())
    change(index)
    digits = index.pop("checksum")
    path.write_bytes(seal(json.dumps({"checksum": digits, **index}).encode()))


def adopt(step: Path, file: str, data: bytes) -> None:
    """Put bytes in a file's place, and make the index say what one would have to."""
    (step / file).write_bytes(data)
    record = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forge(step, lambda index: index["files"].update({file: record}))


def header(text: bytes, length: int | None = None, data: int = 0) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def entry(dtype: str, shape: list[int], *offsets: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def headed(tensors: dict[str, Any], data: int) -> bytes:
    return header(json.dumps(tensors).encode(), data=data)


# Files whose headers lie: none is read into memory on its word.
LIES: dict[str, tuple[bytes, str]] = {
    "a pickle": (pickle.dumps({"a": [1.0] * 300}), "begins like a pickle"),
    "a file of torch.save": (b"PK\x03\x04" + bytes(200), "begins like a pickle"),
    "a length without end": (header(b"{}" * 100, 99_000_000), "invalid header length"),
    "no header": (b"", "header too small"),
    "no JSON": (header(b"[]" * 20), "invalid JSON"),
    "tensors without end": (headed({"a": entry("F32", [2**40], 0, 2**42)}, 64), "not a safetensors file"),
    "dims that multiply beyond counting": (headed({"a": entry("F32", [2**62, 2**62], 0, 64)}, 64), "overflow"),
    "empty dims beside huge ones": (
        headed({"a": entry("F32", [0, 2**62, 2**62], 0, 0)}, 0),
        "more elements than any memory",
    ),
    "tensors that overlap": (headed({"a": entry("U8", [9], 0, 9), "b": entry("U8", [9], 0, 9)}, 9), "invalid offset"),
    "a hole": (headed({"a": entry("U8", [8], 4, 12)}, 12), "invalid offset"),
    "more bytes than the shape takes": (headed({"a": entry("F32", [3], 0, 16)}, 16), "not a safetensors file"),
    "bytes that belong to none": (headed({"a": entry("F32", [3], 0, 12)}, 16), "not a safetensors file"),
    "an unknown type": (headed({"a": entry("F33", [3], 0, 12)}, 12), "unknown variant"),
    "a type that is not read": (headed({"a": entry("F8_E8M0", [12], 0, 12)}, 12), "F8_E8M0, which is not read"),
    "a tensor of another file": (headed({"wte.weight": entry("U8", [4], 0, 4)}, 4), "as well"),
}
