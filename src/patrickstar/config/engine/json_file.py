"""A config from a file of JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patrickstar.errors import ConfigError

__all__ = ["read_json"]


def read_json(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The object that a file has.

    Raises:
        ConfigError: it cannot be read, is no JSON (with line and column), or has a key twice in one object.
    """
    file = Path(path)
    try:
        text = file.read_bytes().decode()
    except OSError as problem:
        raise ConfigError(f"config {file}: {problem.strerror or problem}") from problem
    except UnicodeDecodeError as problem:
        raise ConfigError(f"config {file}: not UTF-8 text, at byte {problem.start}") from problem
    twice: list[str] = []

    def pairs(entries: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in entries]
        twice.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(entries)

    def no_number(word: str) -> None:
        raise ConfigError(f"config {file}: {word} is no number of JSON")

    try:
        found = json.loads(text, object_pairs_hook=pairs, parse_constant=no_number)
    except json.JSONDecodeError as problem:
        raise ConfigError(
            f"config {file}, line {problem.lineno}, column {problem.colno}: {problem.msg}; comments and commas after the last entry are no JSON"
        ) from problem
    except (RecursionError, ValueError) as problem:  # nested, or digits, beyond all measure
        raise ConfigError(f"config {file}: {problem}") from problem
    if twice:
        raise ConfigError(
            f"config {file}: twice in one object: {', '.join(twice)}; which one counts is anybody's guess"
        )
    if not isinstance(found, dict):
        raise ConfigError(f"config {file}: expected an object, as in {{...}}, not {type(found).__name__}")
    return found
