"""The way back from JSON and tensors to what `extra.py` encoded. Only the types listed here are ever made.

Reads what others may have written: every tag, type and size is checked before anything is made of it.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch

from patrickstar.checkpoint.fields import as_list, as_shape, as_str, exact_keys
from patrickstar.checkpoint.tensors import bytes_of
from patrickstar.errors import CheckpointError

__all__ = ["BYTES_ONLY", "FACTORIES", "NUMPY_DTYPE", "decode_tree"]

FACTORIES = MappingProxyType({kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)})
# Types that safetensors does not have; stored as bytes.
BYTES_ONLY = MappingProxyType(
    {str(dtype): dtype for dtype in (torch.complex128, torch.complex32, torch.float8_e8m0fnu)}
)
# Plain NumPy types of fixed width: no objects, no records, no long double, which differs by machine.
NUMPY_DTYPE = re.compile(r"[<>|](b1|[iu][1248]|f[248]|c(8|16)|[SU][0-9]{1,9}|[mM]8(\[[0-9]{0,9}[A-Za-zμ]{1,2}\])?)")


def decode_tree(tree: object, *, fetch: Callable[[str], torch.Tensor], names: Collection[str], where: str) -> object:
    """The value that `encode_tree` encoded; `fetch` gives a tensor by its name, of those in `names`.

    Raises:
        CheckpointError: the tree is nothing that encodes a value; names `where` and the place in it.
    """
    try:
        return _Decoder(fetch, names).decode(tree, where)
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deep to be read") from None


class _Decoder:
    def __init__(self, fetch: Callable[[str], torch.Tensor], names: Collection[str]) -> None:
        self._fetch = fetch
        self._names = names
        self._fetched: dict[str, torch.Tensor] = {}

    def decode(self, tree: object, where: str) -> object:
        if isinstance(tree, list):
            return self.items(tree, where)
        if not isinstance(tree, dict):
            return tree
        if any(key.startswith("$") for key in tree):
            tag = next(iter(tree))
            if len(tree) != 1 or tag not in _TAGS:
                raise CheckpointError(f"{where}: {', '.join(sorted(tree))[:80]!r} is no tag of this format")
            return _TAGS[tag](self, tree[tag], f"{where}.{tag}")
        return {key: self.decode(value, f"{where}[{json.dumps(key)}]") for key, value in tree.items()}

    def items(self, payload: object, where: str) -> list[object]:
        return [self.decode(item, f"{where}[{at}]") for at, item in enumerate(as_list(payload, where))]

    def hashable(self, payload: object, where: str) -> list[Any]:
        found = self.items(payload, where)
        for item in found:
            _require_hashable(item, where)
        return found

    def pairs(self, payload: object, where: str) -> list[tuple[Any, object]]:
        found: list[tuple[Any, object]] = []
        for at, pair in enumerate(as_list(payload, where)):
            items = self.items(pair, f"{where}[{at}]")
            if len(items) != 2:
                raise CheckpointError(f"{where}[{at}]: expected a key and a value, found {len(items)} items")
            _require_hashable(items[0], f"{where}[{at}]")
            found.append((items[0], items[1]))
        return found

    def tensor(self, payload: object, where: str) -> torch.Tensor:
        name = as_str(payload, where)
        if name not in self._names:
            raise CheckpointError(f"{where}: no tensor {name[:80]!r} in this checkpoint")
        if name not in self._fetched:
            self._fetched[name] = self._fetch(name)
        return self._fetched[name]

    def raw(self, payload: object, where: str) -> torch.Tensor:
        found = self.tensor(payload, where)
        if found.dtype != torch.uint8 or found.dim() != 1:
            raise CheckpointError(f"{where}: expected bytes, found {found.dtype} {list(found.shape)}")
        return found

    def typed(self, payload: object, where: str) -> torch.Tensor:
        fields = exact_keys(payload, where, ("tensor", "dtype", "shape"))
        dtype = BYTES_ONLY.get(as_str(fields["dtype"], f"{where}.dtype"))
        if dtype is None:
            raise CheckpointError(f"{where}.dtype: unknown type {str(fields['dtype'])[:40]!r}")
        shape = as_shape(fields["shape"], f"{where}.shape")
        data = self.raw(fields["tensor"], f"{where}.tensor")
        _require_size(math.prod(shape) * dtype.itemsize, data.numel(), where)
        return data.view(dtype).reshape(shape)

    def array(self, payload: object, where: str) -> object:
        fields = exact_keys(payload, where, ("tensor", "dtype", "shape"))
        shape = as_shape(fields["shape"], f"{where}.shape")
        data = self.raw(fields["tensor"], f"{where}.tensor")
        return _numpy_array(bytes(bytes_of(data)), fields["dtype"], shape, where)

    def defaults(self, payload: object, where: str) -> object:
        fields = exact_keys(payload, where, ("factory", "items"))
        factory = fields["factory"]
        if factory is not None and as_str(factory, f"{where}.factory") not in FACTORIES:
            raise CheckpointError(f"{where}.factory: unknown factory {str(factory)[:40]!r}")
        return defaultdict(FACTORIES[str(factory)] if factory else None, self.pairs(fields["items"], f"{where}.items"))

    def complex(self, payload: object, where: str) -> object:
        match self.items(payload, where):
            case [float(real), float(imag)]:
                return complex(real, imag)
        raise CheckpointError(f"{where}: expected two floats")

    def counter(self, payload: object, where: str) -> object:
        counted: Counter[Any] = Counter()
        for key, value in self.pairs(payload, where):
            counted[key] = value  # type: ignore[assignment]  # counts may be anything, as in Python
        return counted


def _decode_scalar(payload: object, where: str) -> object:
    fields = exact_keys(payload, where, ("dtype", "data"))
    return _numpy_array(_from_hex(fields["data"], f"{where}.data"), fields["dtype"], (1,), where)[0]


def _decode_int(payload: object, where: str) -> int:
    text = as_str(payload, where)
    if not re.fullmatch("-?0x[0-9a-f]+", text):
        raise CheckpointError(f"{where}: expected a hexadecimal number")
    return int(text, 16)


def _decode_float(payload: object, where: str) -> float:
    data = _from_hex(payload, where)
    _require_size(8, len(data), where)
    return float(struct.unpack(">d", data)[0])


def _decode_dtype(payload: object, where: str) -> torch.dtype:
    name = as_str(payload, where)
    found = getattr(torch, name.removeprefix("torch."), None) if name.isascii() else None
    if not isinstance(found, torch.dtype) or str(found) != name:
        raise CheckpointError(f"{where}: torch has no type {name[:40]!r}")
    return found


def _decode_device(payload: object, where: str) -> torch.device:
    try:
        return torch.device(as_str(payload, where))
    except RuntimeError:
        raise CheckpointError(f"{where}: torch has no device {str(payload)[:40]!r}") from None


_TAGS: Mapping[str, Callable[[_Decoder, object, str], object]] = MappingProxyType(
    {
        "$int": lambda _, payload, where: _decode_int(payload, where),
        "$float": lambda _, payload, where: _decode_float(payload, where),
        "$complex": _Decoder.complex,
        "$bytes": lambda _, payload, where: _from_hex(payload, where),
        "$blob": lambda decoder, payload, where: bytes(bytes_of(decoder.raw(payload, where))),
        "$tuple": lambda decoder, payload, where: tuple(decoder.items(payload, where)),
        "$set": lambda decoder, payload, where: set(decoder.hashable(payload, where)),
        "$frozenset": lambda decoder, payload, where: frozenset(decoder.hashable(payload, where)),
        "$dict": lambda decoder, payload, where: dict(decoder.pairs(payload, where)),
        "$ordered": lambda decoder, payload, where: OrderedDict(decoder.pairs(payload, where)),
        "$counter": _Decoder.counter,
        "$defaultdict": _Decoder.defaults,
        "$size": lambda _, payload, where: torch.Size(as_shape(payload, where)),
        "$dtype": lambda _, payload, where: _decode_dtype(payload, where),
        "$device": lambda _, payload, where: _decode_device(payload, where),
        "$tensor": _Decoder.tensor,
        "$typed": _Decoder.typed,
        "$array": _Decoder.array,
        "$scalar": lambda _, payload, where: _decode_scalar(payload, where),
    }
)


def _numpy_array(data: bytes, dtype: object, shape: tuple[int, ...], where: str) -> Any:
    import numpy as np  # noqa: PLC0415 - only for those who saved arrays

    spelt = as_str(dtype, f"{where}.dtype")
    if not NUMPY_DTYPE.fullmatch(spelt):
        raise CheckpointError(f"{where}.dtype: no plain NumPy type: {spelt[:40]!r}")
    try:
        known = np.dtype(spelt)
    except (TypeError, ValueError):
        raise CheckpointError(f"{where}.dtype: NumPy has no type {spelt[:40]!r}") from None
    _require_size(math.prod(shape) * known.itemsize, len(data), where)
    # Strings of length 0 take no bytes, which frombuffer cannot divide by.
    return np.frombuffer(bytearray(data), known).reshape(shape) if data else np.zeros(shape, known)


def _from_hex(payload: object, where: str) -> bytes:
    text = as_str(payload, where)
    if len(text) % 2 or not re.fullmatch("[0-9a-f]*", text):
        raise CheckpointError(f"{where}: expected bytes as hexadecimal digits")
    return bytes.fromhex(text)


def _require_size(expected: int, found: int, where: str) -> None:
    if expected != found:
        raise CheckpointError(f"{where}: {found} bytes, expected {expected}")


def _require_hashable(value: object, where: str) -> None:
    try:
        hash(value)
    except TypeError:
        raise CheckpointError(f"{where}: a {type(value).__name__} cannot be a key") from None
    if isinstance(value, torch.Tensor):
        raise CheckpointError(f"{where}: a tensor cannot be a key")
