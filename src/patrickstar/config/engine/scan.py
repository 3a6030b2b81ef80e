"""A config against the table: which keys it gives, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from patrickstar.config.engine.key import Key, Verdict
from patrickstar.config.engine.table import CHILDREN, TABLE
from patrickstar.errors import nearest

__all__ = ["Scan", "scan"]

_SHOWN = 72  # characters of a value in a message


@dataclass(slots=True)
class Scan:
    """A config's keys and values, held against the table.

    Attributes:
        values: of keys that are honoured, by path, converted. problems: by path: what to tell about each.
        idle: keys without effect, by path. sections: the objects that are there.
    """

    values: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    idle: dict[str, tuple[Key, object]] = field(default_factory=dict)
    sections: set[str] = field(default_factory=set)

    def blame(self, path: str, why: str) -> None:
        """Notes a problem, at the end of those of the same key."""
        known = self.problems.get(path)
        self.problems[path] = why if known is None else f"{known}; {why}"

    def messages(self) -> list[str]:
        """Every problem, each with the path of its key."""
        return [f"{path}: {why}" for path, why in self.problems.items()]


def scan(config: Mapping[str, Any]) -> Scan:
    """Looks every key up in the table; raises nothing, and collects what is wrong."""
    found = Scan()
    _scan_object(config, "", "", found)
    return found


def _scan_object(value: Mapping[Any, Any], row: str, shown: str, found: Scan) -> None:
    """The keys of one object. `row`: its path in the table; `shown`: with the names that the user gave."""
    names = CHILDREN[row]
    for name, item in value.items():
        at = f"{shown}.{name}" if shown else str(name)
        if name in names:
            _scan_value(item, f"{row}.{name}" if row else str(name), at, found)
        elif "*" in names and isinstance(name, str):
            _scan_value(item, f"{row}.*", at, found)
        elif row in TABLE and TABLE[row].open and isinstance(name, str):
            found.idle[at] = TABLE[row], item
        else:
            found.blame(at, _unknown(name, row))


def _scan_value(value: object, row: str, shown: str, found: Scan) -> None:
    key, has_keys = TABLE.get(row), row in CHILDREN
    if key is not None and key.verdict is not Verdict.REFUSED and _is_auto(value) and not key.kind.takes(value):
        _scan_auto(key, shown, found)
    elif key is not None and key.refuses(value) and not key.kind.problem(value):
        found.blame(shown, f"{_said(value)} is refused here: {key.why}")
    elif has_keys and isinstance(value, Mapping):
        found.sections.add(shown)
        _scan_object(value, row, shown, found)
    elif has_keys and (value is None or key is None):
        if value is not None:
            found.blame(shown, f"{_said(value)}: expected an object with keys such as {', '.join(CHILDREN[row][:4])}")
    else:
        assert key is not None, f"{row} is neither a key nor an object"
        problem = key.kind.problem(value)
        if problem:
            found.blame(shown, f"{_said(value)}: {problem}")
        elif key.verdict is Verdict.HONOURED:
            found.values[shown] = key.kind.convert(value)
        else:
            found.idle[shown] = key, value


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def _scan_auto(key: Key, shown: str, found: Scan) -> None:
    """`"auto"` is a place that the Trainer of transformers fills from its own arguments. Nothing here does."""
    if key.verdict is Verdict.NO_EFFECT:
        found.idle[shown] = key, "auto"
    else:
        found.blame(
            shown,
            f'"auto" is filled in by the Trainer of transformers, which is not here: write {key.kind.words}, or leave it out',
        )


def _unknown(name: object, row: str) -> str:
    """A message about a key that is not in the table."""
    if not isinstance(name, str):
        return "keys are text"
    names = CHILDREN[row]
    near = nearest(name, names)
    if not near:
        elsewhere = sorted(path for path, key in TABLE.items() if key.name == name and "*" not in path)
        near = f'; did you mean "{elsewhere[0]}"?' if elsewhere else ""
    where = f"keys of {row}" if row else "keys"
    return f"there is no such key{near}{'' if near.endswith('?') else ';'} The {where} are {', '.join(sorted(names))}"


def _said(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
