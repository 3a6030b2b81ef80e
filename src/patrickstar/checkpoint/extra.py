"""Values that users and sessions save beside the tensors of a model, as JSON and safetensors; no pickle in either direction.

    taken                                            comes back as
    None, bool, int of any size, float (NaN too),    the same, bit for bit
      complex, str, bytes
    list, tuple, dict with keys of any kind here,    the same types; what is in them likewise
      OrderedDict, Counter, defaultdict, set,
      frozenset, torch.Size, torch.dtype, torch.device
    tensor, parameter                                a tensor on the CPU that needs no gradient; one object that stands
                                                     in two places comes back as one
    NumPy array or scalar                            the same
    object with state_dict()                         its state: `scheduler.load_state_dict(extra["scheduler"])`

Anything else is refused with the place where it stands, as `extra["loader"]["rng"]`: subclasses of the types above too,
which would come back as something else.

In the JSON these are themselves: null, booleans, strings, lists, finite numbers, and objects whose keys are strings
that do not begin with `$`. All others are an object with one key, `{"$tuple": [1, 2]}`; `decode.py` has the list.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from patrickstar.checkpoint.decode import BYTES_ONLY, FACTORIES, NUMPY_DTYPE
from patrickstar.checkpoint.tensors import DTYPE_CODES, is_plain
from patrickstar.errors import ConfigError

__all__ = ["Encoded", "encode_tree"]

_MOST_DEPTH = 100  # three levels of JSON each, well below what Python's parser takes
_LARGEST_PLAIN_INT = 2**53  # what every reader of JSON has exactly
_INLINE_BYTES = 256
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value as JSON, and the tensors that the JSON refers to by name: contiguous, on the CPU, not copied where they were so."""

    tree: object
    tensors: dict[str, torch.Tensor]


def encode_tree(value: object, *, name: str) -> Encoded:
    """`value` as JSON and tensors; places in it are called `name["key"][0]`.

    Raises:
        ConfigError: something in it cannot be saved; says what and where.
    """
    encoder = _Encoder()
    return Encoded(encoder.encode(value, name), encoder.tensors)


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._references: dict[int, tuple[object, object]] = {}  # by id: the tensor, kept alive so; its reference
        self._inside: list[int] = []  # ids of the containers around the value

    def encode(self, value: object, path: str) -> object:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind is bytes:
            return self._bytes(value, path)  # type: ignore[arg-type]
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if (numpy := _numpy_of(value)) is not None:
            return self._numpy(value, path, numpy)
        with self._entered(value, path):
            if kind in _CONTAINERS:
                return _CONTAINERS[kind](self, value, path)
            # Of a class, state_dict is a function without its object.
            if callable(getattr(kind, "state_dict", None)) and not isinstance(value, type):
                return self.encode(value.state_dict(), f"{path}.state_dict()")  # type: ignore[attr-defined]
        raise ConfigError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved without pickle: give JSON "
            "values, tuples, sets, bytes, tensors, NumPy arrays, or an object with state_dict()"
        )

    def items(self, values: Iterable[object], path: str) -> list[object]:
        return [self.encode(value, f"{path}[{at}]") for at, value in enumerate(values)]

    def pairs(self, values: dict[Any, object], path: str) -> list[object]:
        return [[self.key(key, path), self.encode(value, f"{path}[{_shown(key)}]")] for key, value in values.items()]

    def key(self, value: object, path: str) -> object:
        """A key of a dict or an element of a set: what can be hashed, all of it in the JSON."""
        kind = type(value)
        if kind is tuple:
            return {"$tuple": [self.key(item, path) for item in value]}  # type: ignore[attr-defined]
        if kind is frozenset:
            return {"$frozenset": self.elements(value, path)}  # type: ignore[arg-type]
        if kind is bytes:
            return {"$bytes": value.hex()}  # type: ignore[attr-defined]
        numpy = _numpy_of(value)
        if value is None or kind in (bool, str, *_SCALARS) or (numpy is not None and isinstance(value, numpy.generic)):
            return self.encode(value, f"{path}[{_shown(value)}]")
        raise ConfigError(
            f"{path} has a key or element {_shown(value)} of type {kind.__module__}.{kind.__qualname__}; "
            "keys may be str, int, float, bool, None, bytes, or tuples of these"
        )

    def elements(self, values: Iterable[object], path: str) -> list[object]:
        # Sorted, so that equal sets give equal files.
        return sorted((self.key(value, path) for value in values), key=json.dumps)

    @contextmanager
    def _entered(self, value: object, path: str) -> Iterator[None]:
        if id(value) in self._inside:
            raise ConfigError(f"{path} contains itself")
        if len(self._inside) == _MOST_DEPTH:
            raise ConfigError(f"{path[:_LONGEST_NAME]}... is nested more than {_MOST_DEPTH} levels deep")
        self._inside.append(id(value))
        yield
        self._inside.pop()

    def _bytes(self, value: bytes, path: str) -> object:
        if len(value) <= _INLINE_BYTES:
            return {"$bytes": value.hex()}
        return {"$blob": self._store(torch.frombuffer(bytearray(value), dtype=torch.uint8), path)}

    def _tensor(self, value: torch.Tensor, path: str) -> object:
        if id(value) in self._references:
            return self._references[id(value)][1]
        if not is_plain(value):
            raise ConfigError(
                f"{path} is a tensor without plain elements ({type(value).__qualname__}, {value.layout}, on "
                f"{value.device}): sparse, quantised, meta and managed tensors cannot be saved here; give a dense copy"
            )
        if value.dtype not in DTYPE_CODES and str(value.dtype) not in BYTES_ONLY:
            raise ConfigError(f"{path} is a tensor of {value.dtype}, which cannot be saved: convert it first")
        plain = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        reference: object
        if value.dtype in DTYPE_CODES:
            reference = {"$tensor": self._store(plain, path)}
        else:
            # Not view(uint8): contiguous 1-D first, or 0-dim tensors have no dim to widen.
            stored = self._store(plain.reshape(-1).view(torch.uint8), path)
            reference = {"$typed": {"tensor": stored, "dtype": str(value.dtype), "shape": list(value.shape)}}
        self._references[id(value)] = (value, reference)
        return reference

    def _numpy(self, value: Any, path: str, numpy: ModuleType) -> object:
        spelt = value.dtype.str
        scalar = isinstance(value, numpy.generic)
        if not (scalar or type(value) is numpy.ndarray) or not NUMPY_DTYPE.fullmatch(spelt) or value.dtype.names:
            raise ConfigError(
                f"{path} is a NumPy {type(value).__qualname__} of type {value.dtype}, which cannot be saved without "
                "pickle: give a plain array of numbers, strings or dates"
            )
        if scalar:
            # Cut, because NumPy gives an empty string four bytes that its type does not have.
            return {"$scalar": {"dtype": spelt, "data": value.tobytes()[: value.dtype.itemsize].hex()}}
        # One copy, since NumPy's memory may be read-only or strided.
        data = (
            torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.nbytes else torch.empty(0).byte()
        )
        return {"$array": {"tensor": self._store(data, path), "dtype": spelt, "shape": list(value.shape)}}

    def _store(self, tensor: torch.Tensor, path: str) -> str:
        name = path = path[:_LONGEST_NAME]
        number = 1
        while name in self.tensors:  # two keys may look alike: NaN and NaN
            number += 1
            name = f"{path}#{number}"
        self.tensors[name] = tensor
        return name


def _encode_int(value: Any) -> object:
    return value if abs(value) < _LARGEST_PLAIN_INT else {"$int": hex(value)}


def _encode_float(value: Any) -> object:
    # The bits, since NaNs differ.
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _encode_dict(encoder: _Encoder, value: dict[Any, object], path: str) -> object:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encoder.encode(item, f"{path}[{_shown(key)}]") for key, item in value.items()}
    return {"$dict": encoder.pairs(value, path)}


def _encode_defaultdict(encoder: _Encoder, value: defaultdict[Any, object], path: str) -> object:
    factory = value.default_factory
    name = getattr(factory, "__name__", None)
    if factory is not None and FACTORIES.get(str(name)) is not factory:
        raise ConfigError(f"{path} is a defaultdict of {factory!r}, which cannot be saved: give dict(...) of it")
    return {"$defaultdict": {"factory": name, "items": encoder.pairs(value, path)}}


_SCALARS: Mapping[type, Callable[[Any], object]] = MappingProxyType(
    {
        int: _encode_int,
        float: _encode_float,
        complex: lambda value: {"$complex": [_encode_float(value.real), _encode_float(value.imag)]},
        torch.dtype: lambda value: {"$dtype": str(value)},
        torch.device: lambda value: {"$device": str(value)},
    }
)
_CONTAINERS: Mapping[type, Callable[[_Encoder, Any, str], object]] = MappingProxyType(
    {
        list: _Encoder.items,
        tuple: lambda encoder, value, path: {"$tuple": encoder.items(value, path)},
        torch.Size: lambda _, value, __: {"$size": list(value)},
        dict: _encode_dict,
        OrderedDict: lambda encoder, value, path: {"$ordered": encoder.pairs(value, path)},
        Counter: lambda encoder, value, path: {"$counter": encoder.pairs(value, path)},
        defaultdict: _encode_defaultdict,
        set: lambda encoder, value, path: {"$set": encoder.elements(value, path)},
        frozenset: lambda encoder, value, path: {"$frozenset": encoder.elements(value, path)},
    }
)


def _numpy_of(value: object) -> ModuleType | None:
    """NumPy, if the value is an array or a scalar of NumPy. Not imported to find out: who has one has imported it."""
    numpy = sys.modules.get("numpy")
    return numpy if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic) else None


def _shown(key: object) -> str:
    return json.dumps(key) if type(key) is str else ascii(key)
