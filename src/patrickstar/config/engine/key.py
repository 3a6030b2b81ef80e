"""A row of the table: one key, what its value may be, and what becomes of the key here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from patrickstar.config.engine.kinds import FLAG, OBJECT, Kind, same_value

__all__ = ["Key", "Verdict", "foreign", "honoured", "idle_keys", "no_effect", "refused", "switched"]


class Verdict(Enum):
    """Treatment of a key."""

    HONOURED = "honoured"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a config.

    Attributes:
        path: its name, and those of the objects around it, with dots between; `*` stands for a name that the user gives.
        kind: what its value may be.
        why: what it does here, why it has no effect, or what to write instead.
        harmless: of a key that is refused, the values that ask for nothing: these have no effect.
        loud: whether a user should be warned that it has no effect, because what it asks for does not happen.
        open: whether the keys within it are another program's, and may be any.
    """

    path: str
    kind: Kind
    verdict: Verdict
    why: str
    harmless: tuple[object, ...] = (None, False)
    loud: bool = False
    open: bool = False

    @property
    def name(self) -> str:
        """The last part of the key's path."""
        return self.path.rpartition(".")[2]

    def refuses(self, value: object) -> bool:
        """Tells whether a value, which is of the kind, is refused."""
        return self.verdict is Verdict.REFUSED and not any(same_value(value, other) for other in self.harmless)


def honoured(path: str, kind: Kind, why: str) -> Key:
    """A key that does what it says."""
    return Key(path=path, kind=kind, verdict=Verdict.HONOURED, why=why)


def no_effect(within: str, why: str, *, loud: bool = False, **kinds: Kind) -> tuple[Key, ...]:
    """Keys of one object (`""`: of the config itself) that have no effect for one reason, by name."""
    return idle_keys(within, why, kinds, loud=loud)


def idle_keys(within: str, why: str, kinds: Mapping[str, Kind], *, loud: bool = False) -> tuple[Key, ...]:
    """Rows without effect, as `idle` gives them, of names that may be no Python names."""
    prefix = f"{within}." if within else ""
    return tuple(
        Key(path=prefix + name, kind=kind, verdict=Verdict.NO_EFFECT, why=why, loud=loud)
        for name, kind in kinds.items()
    )


def switched(within: str, instead: str, kinds: Mapping[str, Kind], *, switch: str = "enabled") -> tuple[Key, ...]:
    """An object that is refused when it is switched on, and whose other keys have no effect otherwise."""
    on = f"{within}.{switch}"
    return refused(on, FLAG, instead), *idle_keys(within, f"without {on}", kinds)


def refused(path: str, kind: Kind, why: str, *, harmless: tuple[object, ...] = (None, False)) -> Key:
    """A key that is refused, unless its value is one that asks for nothing."""
    return Key(path=path, kind=kind, verdict=Verdict.REFUSED, why=why, harmless=harmless)


def foreign(path: str, why: str) -> Key:
    """An object whose keys are another program's, and may be any; those that the table has are checked."""
    return Key(path=path, kind=OBJECT, verdict=Verdict.NO_EFFECT, why=why, open=True)
