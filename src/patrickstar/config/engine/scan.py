"""A config against the table: what it says, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from patrickstar.config.engine.table import IGNORED, OPAQUE, SECTIONS, TABLE, Key
from patrickstar.errors import nearest


@dataclass(slots=True)
class Scan:
    """The keys of a config, by path: values of honoured ones, converted; problems; those without effect."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    def of(self, section: str) -> dict[str, Any]:
        """The values of one object, by name."""
        return {path[len(section) + 1 :]: v for path, v in self.values.items() if path.startswith(f"{section}.")}

    def blame(self, path: str, why: str) -> None:
        """Notes a problem, at the end of those of the same key."""
        self.problems[path] = f"{self.problems[path]}; {why}" if path in self.problems else why

    def look_up(self, config: Mapping[Any, Any], within: str = "") -> None:
        """Takes the keys of an object, and of the objects in it."""
        for name, value in config.items():
            path = f"{within}.{name}" if within else str(name)
            if path in TABLE:
                self._take(path, TABLE[path], value)
            elif path in SECTIONS and isinstance(value, Mapping | None):
                self.look_up(value or {}, path)
            elif not _has_no_effect(name, within):
                self.blame(path, f"{value!r}: expected an object" if path in SECTIONS else _unknown(name, within))
            elif isinstance(value, Mapping):
                self.look_up(value, path)
            else:
                self.ignored.append(path)

    def _take(self, path: str, key: Key, value: Any) -> None:
        if key.kind is None:
            is_harmless = value is None or (isinstance(value, bool | int | float | str) and value in key.harmless)
            if not is_harmless:
                self.blame(path, f"{value!r:.72} is refused here: {key.text}")
        elif key.kind.takes(value):
            self.values[path] = key.kind.convert(value)
        elif str(value) == "auto":
            why = '"auto" is for the Trainer of transformers to fill in, which is not here'
            self.blame(path, f"{why}: write {key.kind.words}")
        else:
            self.blame(path, f"{value!r:.72}: expected {key.kind.words}")


def _has_no_effect(name: object, within: str) -> bool:
    """Tells whether a name is one without effect. One that has an effect elsewhere is, in objects that have none."""
    can_have = within in {"", *SECTIONS} and any(path.endswith(f".{name}") for path in TABLE)
    return (name in IGNORED and not can_have) or not OPAQUE.isdisjoint(within.split("."))


def _unknown(name: object, within: str) -> str:
    inside = [path.removeprefix(f"{within}.") for path in TABLE if not within or path.startswith(f"{within}.")]
    here = sorted({path.partition(".")[0] for path in inside})
    elsewhere = [path for path in TABLE if path.endswith(f".{name}")]
    near = f'; did you mean "{elsewhere[0]}"?' if elsewhere else nearest(str(name), [*here, *IGNORED])
    return f"there is no such key{near or '; the keys with a meaning here are ' + ', '.join(here)}"
