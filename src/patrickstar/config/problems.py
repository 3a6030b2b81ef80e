"""Problems of an option group: phrases that are collected, and told all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from patrickstar.errors import ConfigError, nearest

# What people call our words elsewhere, where no spelling is near.
OTHER_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "gpu": "cuda", "nvme": "disk"}
)


def unknown_argument(name: str, known: Iterable[str]) -> str:
    """A message about an argument nobody knows: the nearest spelling, and all there are."""
    known = sorted(known)
    near = nearest(OTHER_NAMES.get(name, name), known)
    return (
        f"there is no argument {name!r}{near}{' The arguments' if near else '; the arguments'} are {', '.join(known)}"
    )


def parsed(parse: Callable[..., object], value: object, **how: object) -> list[str]:
    """The problem of a text or number that something else reads, and None may stand in the place of."""
    try:
        if value is not None:
            parse(value, **how)
    except ConfigError as error:
        return [str(error)]
    return []


def later(name: str, value: object, *, default: object) -> list[str]:
    """The problem of an option that this version knows only by name: any value but the option's default."""
    if type(value) is type(default) and value == default:
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
    near = nearest(OTHER_NAMES.get(value, value), words) if isinstance(value, str) else ""
    return [f"{name}={value!r}: expected {expected}{near}"]


def refuse(problems: Sequence[str], *, of: str) -> None:
    """Nothing, where there are no problems. ConfigError: there are; the message has every one."""
    if len(problems) == 1:
        raise ConfigError(f"{of}: {problems[0]}", problems=problems)
    if problems:
        raise ConfigError("\n  ".join([f"{of}: {len(problems)} problems", *problems]), problems=problems)
