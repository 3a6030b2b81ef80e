"""Sizes as people write them, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Final

from patrickstar.errors import ConfigError, nearest

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_UNITS: Final[Mapping[str, int]] = MappingProxyType(
    {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
)
_BINARY: Final = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*|%)\s*")
_ALLOWED: Final = 'an int in bytes, or a string such as "512MiB", "1.5GB" or "70%"'


def parse_size(value: int | str, *, name: str, total_bytes: int | None = None, least_bare: int = 1) -> int:
    """Bytes from `6 * 2**30`, `"6GiB"`, `"1.5GB"`, or `"70%"` of `total_bytes`; a fraction of a byte is dropped.

    `least_bare`: the smallest number that may stand in text without a unit. Who writes a smaller one has forgotten the unit.

    Raises:
        ConfigError: anything else; the message names the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{name}={value!r}: expected {_ALLOWED}")
    size = value if isinstance(value, int) else _parse(value, name=name, total_bytes=total_bytes)
    if size <= 0:
        raise ConfigError(f"{name}={value!r}: a budget is more than 0 bytes")
    if size < least_bare and isinstance(value, str) and re.fullmatch(r"[0-9.\s]*", value):
        meant = f"{value.strip()}{'GiB' if size < KIB else 'MiB'}"
        raise ConfigError(f'{name}={value!r}: {size} bytes; {meant}? Give the unit, as in "{meant}"')
    return size


def parse_rate(value: int | str, *, name: str) -> int:
    """Bytes a second from `2 * 2**30` or `"2GiB/s"`. ConfigError: anything else; the message names the argument."""
    wanted = 'bytes a second, or text such as "2GiB/s"'
    if isinstance(value, bool) or not isinstance(value, int | str) or (isinstance(value, str) and value[-2:] != "/s"):
        raise ConfigError(f"{name}={value!r}: expected {wanted}")
    try:
        return parse_size(value.removesuffix("/s") if isinstance(value, str) else value, name=name)
    except ConfigError as error:
        raise ConfigError(f"{name}={value!r}: expected {wanted}, and more than 0") from error


def _parse(text: str, *, name: str, total_bytes: int | None) -> int:
    found = _SIZE.fullmatch(text)
    if not found:
        raise ConfigError(f"{name}={text!r}: expected {_ALLOWED}")
    number, unit = Fraction(found[1]), found[2]  # a fraction: "0.1GiB" and a hundred digits alike are exact
    if unit == "%":
        if total_bytes is None:
            raise ConfigError(f"{name}={text!r}: the total of this tier is not known here; give it in bytes")
        if number > 100:
            raise ConfigError(f"{name}={text!r}: more than the whole tier; expected at most 100%")
        return int(number * total_bytes / 100)
    if unit.endswith("b") and (unit == "b" or not unit.islower()):  # "6Gb" are gigabits to some
        raise ConfigError(f'{name}={text!r}: unknown unit {unit!r}; did you mean "{unit[:-1]}B"?')
    for known, nbytes in _UNITS.items():
        if unit.lower() in ("", known.lower()):
            return int(number * nbytes)
    raise ConfigError(f"{name}={text!r}: unknown unit {unit!r}{nearest(unit, _UNITS)}; expected {_ALLOWED}")


def format_budget(size: int) -> str:
    """`13.25 GiB`, rounded up: read back, it is not less than `size`."""
    unit, name = next(((unit, name) for unit, name in _BINARY if size >= unit), (1, "B"))
    return f"{size} B" if unit == 1 else f"{hundredths(size, unit) / 100:.2f} {name}"


def hundredths(size: int, unit: int) -> int:
    """Hundredths of a unit that are not less than `size` bytes, also when a fraction of a byte is dropped."""
    found = -(-size * 100 // unit)
    return found if found * unit // 100 >= size else found + 1


def format_bytes(size: int) -> str:
    """`13.25 GiB`, `512 B`: two decimals and a binary unit."""
    for unit, name in _BINARY:
        if abs(size) >= unit - unit // 204_800:  # what would print as 1024.00 of the next smaller unit
            return f"{size / unit:.2f} {name}"
    return f"{size} B"
