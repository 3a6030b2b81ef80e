"""Strict reading of JSON that others may have written: every problem names the file and the key."""

from __future__ import annotations

from collections.abc import Iterable

from patrickstar.errors import CheckpointError

_LARGEST = 2**63 - 1  # what offsets of files and sizes of tensors can be


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


def as_int(value: object, where: str) -> int:
    """`value` if it is a whole number of 0 or more; `true` and `1.0` are none."""
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise CheckpointError(f"{where}: expected a whole number from 0 to {_LARGEST}, found {_shown(value)}")
    return value


def as_shape(value: object, where: str) -> tuple[int, ...]:
    """`value` if it is a list of whole numbers; what is no shape of the model's is another model's."""
    if not isinstance(value, list):
        raise CheckpointError(f"{where}: expected a list, found {_shown(value)}")
    return tuple(as_int(dim, f"{where}[{at}]") for at, dim in enumerate(value))


def _shown(value: object) -> str:
    text = f"{value!r}"
    return text if len(text) <= 60 else f"{text[:57]}..."
