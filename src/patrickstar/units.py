"""Sizes and counts as people write them, and back."""

from __future__ import annotations

import re

from patrickstar.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*")
_ALLOWED = 'an int in bytes, or a string such as "512MiB", "1.5GB" or "70%"'


def parse_size(value: int | str, *, name: str, total_bytes: int | None = None) -> int:
    """Bytes from `6 * 2**30`, `"6GiB"`, `"1.5GB"`, or `"70%"` of `total_bytes`.

    Raises:
        ConfigError: anything else; the message names the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{name}={value!r}: expected {_ALLOWED}")
    if isinstance(value, int):
        size = value
    else:
        found = _SIZE.fullmatch(value)
        if not found:
            raise ConfigError(f"{name}={value!r}: expected {_ALLOWED}")
        number, unit = found.groups()
        if unit == "%":
            if total_bytes is None:
                raise ConfigError(f"{name}={value!r}: the total of this tier is not known here; give it in bytes")
            if float(number) > 100:
                raise ConfigError(f"{name}={value!r}: more than the whole tier; expected at most 100%")
            size = int(float(number) * total_bytes / 100)
        elif unit.upper() in _UNITS and unit != "b":
            size = int(float(number) * _UNITS[unit.upper()])
        else:
            raise ConfigError(f"{name}={value!r}: unknown unit {unit!r}; expected {_ALLOWED}")
    if size <= 0:
        raise ConfigError(f"{name}={value!r}: a budget is more than 0 bytes")
    return size


def format_bytes(size: int) -> str:
    """`13.25 GiB`, `512 B`: three or four digits and a binary unit."""
    for unit, name in ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"
