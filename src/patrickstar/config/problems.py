"""What is wrong with an option group: phrases that are collected, and told all at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from patrickstar.errors import ConfigError, nearest


def unknown_argument(name: str, known: Iterable[str], *, of: str = "manage()") -> str:
    """What to tell about an argument nobody knows: the nearest spelling, and all there are."""
    known = sorted(known)
    near = nearest(name, known)
    return f"{of} has no argument {name!r}{near}{' ' if near else '; '}it takes {', '.join(known)}"


def later(name: str, value: object, *, default: object) -> list[str]:
    """The problem of an option that this version knows only by name: anything but its default."""
    if value == default and type(value) is type(default):
        return []
    return [f"{name}={value!r} arrives in a later version; leave it at {default!r}"]


def choice(name: str, value: object, allowed: Sequence[str | None], *, to_come: Sequence[str] = ()) -> list[str]:
    """The problem of a word that is not among the allowed ones, or not yet."""
    if isinstance(value, str | None) and value in allowed:
        return []
    expected = " or ".join(repr(word) for word in allowed)
    if isinstance(value, str) and value in to_come:
        return [f"{name}={value!r} arrives in a later version; now it is {expected}"]
    words = [word for word in (*allowed, *to_come) if word is not None]
    near = nearest(value, words) if isinstance(value, str) else ""
    return [f"{name}={value!r}: expected {expected}{near}"]


def refuse(problems: Sequence[str], *, of: str) -> None:
    """Nothing, where there are no problems.

    Raises:
        ConfigError: there are; the message has every one.
    """
    if len(problems) == 1:
        raise ConfigError(f"{of}: {problems[0]}")
    if problems:
        raise ConfigError("\n  ".join([f"{of}: {len(problems)} problems", *problems]))
