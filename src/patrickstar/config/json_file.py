"""Files of one JSON object: configs, and what flags of the command line name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from patrickstar.errors import ConfigError, Error


def read_json(
    path: str | os.PathLike[str], *, what: str = "config", damaged: type[Error] = ConfigError
) -> dict[str, Any]:
    """The object that a file has. `what`: the file is, in messages.

    Raises:
        ConfigError: it cannot be read. damaged: it is no JSON (with line and column), no object, or has a key twice in one object.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as problem:
        raise ConfigError(f"{what} {path}: {problem.strerror or problem}") from problem
    return parse_json(data, where=f"{what} {path}", damaged=damaged)


def parse_json(data: bytes | bytearray, *, where: str, damaged: type[Error]) -> dict[str, Any]:
    """The object that some bytes spell, in UTF-8. Raises `damaged` as `read_json` does, and says where."""
    try:
        found = json.loads(data.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as problem:  # no UTF-8, no JSON; nested, or digits, beyond all measure
        raise damaged(f"{where}: not JSON: {problem}") from problem
    if not isinstance(found, dict):
        raise damaged(f"{where}: expected a JSON object, as in {{...}}, not {type(found).__name__}")
    return found


def _once(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"twice in one object: {', '.join(twice)}; which one counts is anybody's guess")
    return dict(entries)
