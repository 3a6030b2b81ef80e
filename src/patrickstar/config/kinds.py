"""Kinds of values: in words, as a test, and as what a value becomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: in words that follow "expected", whether a value is one, and what the value becomes."""

    words: str
    takes: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


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
TEXT_OR_NULL: Final = or_null(TEXT)
COUNT_OR_NULL: Final = or_null(COUNT)
WHOLE_OR_NULL: Final = or_null(WHOLE)
RATE_OR_NULL: Final = or_null(RATE)
