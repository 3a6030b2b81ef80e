"""Kinds of values of a config: in words, as a test, and as the Python value that a value stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Final

from patrickstar.errors import nearest

__all__ = [
    "ANYTHING",
    "BETAS",
    "COUNT",
    "FLAG",
    "FRACTION",
    "LIST",
    "NUMBER",
    "OBJECT",
    "POSITIVE",
    "TEXT",
    "WHOLE",
    "Kind",
    "number",
    "or_null",
    "same_value",
    "whole",
    "word",
]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value.

    Attributes:
        words: to follow "expected". takes: whether it is one. convert: the value it stands for, of one that is taken.
        choices: the words there are to choose from, where it is one of a few. elsewhere: words that mean something elsewhere, in
            lower case, and what to write instead of them.
    """

    words: str
    takes: Callable[[object], bool]
    convert: Callable[[Any], object] = lambda value: value
    choices: tuple[str, ...] = ()
    elsewhere: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def problem(self, value: object) -> str:
        """The problem of a value; "" where there is none."""
        if self.takes(value):
            return ""
        if isinstance(value, str) and value.lower() in self.elsewhere:
            return self.elsewhere[value.lower()]
        near = nearest(value, self.choices) if isinstance(value, str) and self.choices else ""
        return f"expected {self.words}{near}"


def whole(low: int | None = 0, high: int | None = None) -> Kind:
    """A whole number; `5e8`, which JSON reads as a float, is one too."""

    def takes(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            return False
        if not isinstance(value, Integral) and not float(value).is_integer():
            return False
        return _within(float(value), low, high)

    return Kind(f"a whole number{_range(low, high)}", takes, int)


def number(low: float | None = None, high: float | None = None, *, above: float | None = None) -> Kind:
    """A finite number, at least `low` and at most `high`, or more than `above`."""

    def takes(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            return False
        return _within(float(value), low, high) and (above is None or float(value) > above)

    return Kind(f"a finite number{_range(low, high, above)}", takes, float)


def word(*choices: str, any_case: bool = False) -> Kind:
    """One of a few words; converted to how it is spelt here."""
    by_case = {choice.lower() if any_case else choice: choice for choice in choices}

    def spelt(value: str) -> str:
        return value.lower() if any_case else value

    def takes(value: object) -> bool:
        return isinstance(value, str) and spelt(value) in by_case

    shown = " or ".join(f'"{choice}"' for choice in choices)
    return Kind(shown, takes, lambda value: by_case[spelt(value)], choices)


def or_null(kind: Kind) -> Kind:
    """A kind whose values may be null as well."""
    return Kind(
        f"{kind.words}, or null",
        lambda value: value is None or kind.takes(value),
        lambda value: None if value is None else kind.convert(value),
        kind.choices,
        kind.elsewhere,
    )


def same_value(value: object, other: object) -> bool:
    """Tells whether two values of JSON are the same: 1 is 1.0, but not true."""
    if value is not None and not isinstance(value, str | Real):
        return False  # an array, say, which is equal to many things
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _range(low: float | None, high: float | None, above: float | None = None) -> str:
    if above is not None:
        return f" above {above:g}" + ("" if high is None else f" and at most {high:g}")
    if low is None:
        return "" if high is None else f" of at most {high:g}"
    return f" of {low:g} or more" if high is None else f" from {low:g} to {high:g}"


def _is_pair_of_betas(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        return False
    return all(number(0, 1).takes(beta) and float(beta) < 1 for beta in value)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


ANYTHING: Final = Kind("anything", lambda _: True)
FLAG: Final = Kind("true or false", lambda value: isinstance(value, bool))
TEXT: Final = Kind("text", lambda value: isinstance(value, str))
LIST: Final = Kind("a list", _is_list)
OBJECT: Final = Kind("an object", lambda value: isinstance(value, Mapping))
WHOLE: Final = whole()
COUNT: Final = whole(1)
NUMBER: Final = number()
POSITIVE: Final = number(above=0)
FRACTION: Final = number(0, 1)
BETAS: Final = Kind(
    "two numbers, each at least 0 and below 1",
    _is_pair_of_betas,
    lambda pair: (float(pair[0]), float(pair[1])),
)
