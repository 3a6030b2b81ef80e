"""Strict reading of JSON that others may have written: every problem names the file and the key."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

from patrickstar.errors import CheckpointError

__all__ = ["as_int", "as_object", "as_shape", "as_str", "exact_keys", "parse_object"]

_LARGEST = 2**63 - 1  # what offsets of files and sizes of tensors can be
_MOST_DIMS = 64


def parse_object(data: bytes | bytearray, *, where: str) -> dict[str, object]:
    """The JSON object that `data` spells, in UTF-8.

    Raises:
        CheckpointError: anything else, a key that stands twice in one object.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise CheckpointError(f"{where}: JSON nested too deep to be read") from None
    except ValueError as problem:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{where}: not the JSON it should be: {problem}") from None
    return as_object(value, where)


def as_object(value: object, where: str) -> dict[str, object]:
    """`value` if it is a JSON object."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected an object, found {_shown(value)}")
    return value


def exact_keys(value: object, where: str, keys: Iterable[str]) -> dict[str, object]:
    """`value` if it is an object with exactly these keys."""
    found, wanted = as_object(value, where), set(keys)
    if missing := sorted(wanted - found.keys()):
        raise CheckpointError(f"{where}: key {missing[0]!r} is missing")
    if unknown := sorted(found.keys() - wanted):
        raise CheckpointError(f"{where}: unknown key {unknown[0]!r}")
    return found


def as_str(value: object, where: str) -> str:
    """`value` if it is a string."""
    if not isinstance(value, str):
        raise CheckpointError(f"{where}: expected a string, found {_shown(value)}")
    return value


def as_int(value: object, where: str, *, most: int = _LARGEST) -> int:
    """`value` if it is a whole number in [0, most]; `true` and `1.0` are none."""
    if type(value) is not int or not 0 <= value <= most:
        raise CheckpointError(f"{where}: expected a whole number from 0 to {most}, found {_shown(value)}")
    return value


def as_shape(value: object, where: str) -> tuple[int, ...]:
    """`value` if it is the shape of a tensor whose number of elements is one that memory could hold."""
    if not isinstance(value, list):
        raise CheckpointError(f"{where}: expected a list, found {_shown(value)}")
    if len(value) > _MOST_DIMS:
        raise CheckpointError(f"{where}: {len(value)} dims; at most {_MOST_DIMS}")
    shape = tuple(as_int(dim, f"{where}[{at}]") for at, dim in enumerate(value))
    # Empty dims counted as one: torch multiplies the others into strides even where there are no elements.
    if math.prod(max(dim, 1) for dim in shape) > _LARGEST:
        raise CheckpointError(f"{where}: {_shown(list(shape))} has more elements than any memory")
    return shape


def _shown(value: object) -> str:
    text = f"{value!r}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unique(pairs: list[tuple[str, object]]) -> Mapping[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key[:60]!r} stands twice in one object")
        found[key] = value
    return found
