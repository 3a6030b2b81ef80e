"""Kinds of values: in words, as a test, as what a value becomes, and with a hint at what else was meant; groups of options, each of its kind.

Problems of a group are phrases that are collected, and told all at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from types import MappingProxyType
from typing import Any, Final

from patrickstar.errors import ConfigError, Error, nearest

# What people call our words elsewhere, where no spelling is near.
OTHER_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "gpu": "cuda", "nvme": "disk"}
    | {"embedding_rows": "tile_rows"}
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: in words that follow "expected", whether a value is one, what the value becomes; a hint ends the words for another."""

    words: str
    takes: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    hint: Callable[[Any], str] = lambda _: ""

    def problems(self, name: str, value: Any) -> list[str]:
        """The problem of an argument, if it has one."""
        return [] if self.takes(value) else [f"{name}={value!r}: expected {self.words}{self.hint(value)}"]

    def read(self, value: Any, where: str, error: type[Error]) -> Any:
        """The value, converted. `error`: raised where it is of another kind, with its place."""
        if not self.takes(value):
            raise error(f"{where}: expected {self.words}, found {value!r:.60}")
        return self.convert(value)


def near(*words: str) -> Callable[[Any], str]:
    """A hint at the nearest of some words; a number behind a colon does not count."""

    def hint(value: Any) -> str:
        word = value.partition(":")[0] if isinstance(value, str) else ""
        return nearest(OTHER_NAMES.get(word, word), words)

    return hint


def number(words: str, holds: Callable[[Any], bool], convert: Callable[[Any], Any] = float) -> Kind:
    """A finite number for which something holds; with `int` a whole one, such as 5e8, which JSON reads as a float."""

    def takes(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, Real):
            return False
        try:
            return math.isfinite(value) and convert(value) == value and holds(value)
        except OverflowError:  # a whole number beyond all floats
            return False

    return Kind(words, takes, convert)


def integer(*, least: int, of: int = 1) -> Kind:
    """An `int`, a multiple of a number, or None."""
    return Kind(
        f"{f'a multiple of {of}' if of > 1 else 'a whole number'}, {least} or more, or None",
        lambda value: value is None or (type(value) is int and value >= least and value % of == 0),
        hint=lambda value: f", such as {value - value % of}" if of > 1 and type(value) is int and value > least else "",
    )


def choice(*allowed: str | None, to_come: Sequence[str] = ()) -> Kind:
    """One of a few words, as it is spelt here, or None where that is among them. `to_come`: words that a later version takes."""
    later = f" ({' or '.join(map(repr, to_come))} arrives in a later version)" if to_come else ""
    return Kind(
        " or ".join(map(repr, allowed)) + later,
        lambda value: isinstance(value, str | None) and value in allowed,
        hint=near(*filter(None, (*allowed, *to_come))),
    )


def word(*choices: str) -> Kind:
    """One of a few words, in any case of letters; converted to how it is spelt here."""
    spelt = {choice.lower(): choice for choice in choices}
    return Kind(
        " or ".join(f'"{choice}"' for choice in choices),
        lambda value: isinstance(value, str) and value.lower() in spelt,
        lambda value: spelt[value.lower()],
    )


def or_null(kind: Kind) -> Kind:
    """A kind whose values may be null as well."""
    return Kind(
        f"{kind.words}, or null", lambda v: v is None or kind.takes(v), lambda v: v if v is None else kind.convert(v)
    )


def _are_betas(value: Any) -> bool:
    is_pair = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2
    return is_pair and all(FRACTION.takes(beta) and beta < 1 for beta in value)


ANYTHING: Final = Kind("anything", lambda _: True)
OBJECT: Final = Kind("an object", lambda value: isinstance(value, Mapping))
FLAG: Final = Kind("true or false", lambda value: isinstance(value, bool))
TEXT: Final = Kind("text", lambda value: isinstance(value, str))
WHOLE: Final = number("a whole number of 0 or more", lambda value: value >= 0, int)
COUNT: Final = number("a whole number of 1 or more", lambda value: value >= 1, int)
POWER: Final = number("a whole number from 0 to 127", lambda value: 0 <= value <= 127, int)
RATE: Final = number("a finite number of 0 or more", lambda value: value >= 0)
NORM: Final = number("a finite number of 0 or more, or -1", lambda value: value >= 0 or value == -1)
SCALE: Final = number("a finite number from 0 to 2**127", lambda value: 0 <= value <= 2.0**127)
POSITIVE: Final = number("a finite number above 0", lambda value: value > 0)
FRACTION: Final = number("a finite number from 0 to 1", lambda value: 0 <= value <= 1)
SHARE: Final = number("a finite number above 0 and at most 1", lambda value: 0 < value <= 1)
BETAS: Final = Kind("two numbers, each at least 0 and below 1", _are_betas, lambda pair: tuple(map(float, pair)))


class OptionGroup:
    """A group of options, which are given by name. ConfigError: one that there is not."""

    __slots__ = ()

    def __new__(cls, *_: Any, **given: Any) -> Any:
        known = cls.__dataclass_fields__  # type: ignore[attr-defined]
        refuse([unknown_argument(name, known) for name in given if name not in known], of=cls.__name__)
        return object.__new__(cls)


def option(default: Any, kind: Kind) -> Any:
    """A field of a group: its default, and the kind that its values are of."""
    return field(default=default, metadata={"kind": kind})


def problems_of(group: Any) -> list[str]:
    """The problems of the options of a group that are not of their kinds."""
    kinds = {one.name: one.metadata["kind"] for one in fields(group) if one.metadata}
    return [problem for name, kind in kinds.items() for problem in kind.problems(name, getattr(group, name))]


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


def refuse(problems: Sequence[str], *, of: str) -> None:
    """Nothing, where there are no problems. ConfigError: there are; the message has every one."""
    if len(problems) == 1:
        raise ConfigError(f"{of}: {problems[0]}", problems=problems)
    if problems:
        raise ConfigError("\n  ".join([f"{of}: {len(problems)} problems", *problems]), problems=problems)
