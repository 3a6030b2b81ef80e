"""A config from a file of JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from patrickstar.errors import ConfigError


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object that a file has.

    Raises:
        ConfigError: it cannot be read, is no JSON (with line and column), or has a key twice in one object.
    """
    try:
        found = json.loads(Path(path).read_bytes().decode(), object_pairs_hook=_once, parse_constant=_no_number)
    except OSError as problem:
        raise ConfigError(f"config {path}: {problem.strerror or problem}") from problem
    except (ValueError, RecursionError) as problem:  # no UTF-8, no JSON; nested, or digits, beyond all measure
        raise ConfigError(f"config {path}: {problem}") from problem
    if not isinstance(found, dict):
        raise ConfigError(f"config {path}: expected an object, as in {{...}}, not {type(found).__name__}")
    return found


def _once(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"twice in one object: {', '.join(twice)}; which one counts is anybody's guess")
    return dict(entries)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")
