"""Files that a flag names, each with one JSON object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from patrickstar.errors import ConfigError, Error


def read_object(path: Path, *, flag: str, damaged: type[Error]) -> dict[str, Any]:
    """The object that a file has.

    Raises:
        ConfigError: it cannot be read. damaged: it has no such object.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error
    except ValueError as error:
        raise damaged(f"{flag} {path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise damaged(f"{flag} {path}: expected a JSON object, not a {type(found).__name__}")
    return found
