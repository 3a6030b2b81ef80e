"""Tensors as files see them: types by the format's names, and memory as bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "U16": torch.uint16,
        "I16": torch.int16,
        "U32": torch.uint32,
        "I32": torch.int32,
        "U64": torch.uint64,
        "I64": torch.int64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
        "C64": torch.complex64,
    }
)
DTYPE_CODES = MappingProxyType({dtype: code for code, dtype in DTYPES.items()})


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint, before the tensor's bytes are known.

    `stem` is the family of files it goes to: tensors of the stem "weights" lie in `weights-00001-of-00003.safetensors`
    and so on, and nothing else lies there.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stem: str = "tensors"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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
