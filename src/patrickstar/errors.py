"""Errors that this package raises on purpose, as a tree.

    Error
    ├── BudgetError      something does not fit a tier's budget
    ├── ConfigError      an argument, key, flag or optimizer is not one we take
    ├── LayoutError      parameters that cannot be managed
    ├── StateError       a call at the wrong time
    ├── CheckpointError  a file that is not what it should be
    ├── DeviceError      a device or a disk directory that does not do its work
    └── RankError        another rank that is gone, does not answer, or does something else
        └── RankLost     the same in an elastic job, which goes on without that rank

Each message says what happened, the numbers, and what to change.
"""

from __future__ import annotations

import copyreg
import difflib
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "Error",
    "LayoutError",
    "RankError",
    "RankLost",
    "StateError",
]


class Error(Exception):
    """Base of all errors this package raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A pool of processes pickles what its workers raise; made from the message alone, a constructor that wants more would fail there.
        return copyreg.__newobj__, (type(self), *self.args), dict(vars(self))  # type: ignore[attr-defined]  # as any object is made again


class BudgetError(Error):
    """Something does not fit a tier's budget.

    Attributes:
        tier: "device", "host" or "disk".
        moment: the op of the step that does not fit, as `"118 backward layers.7.mlp.w1"`; "" where no step is involved.
        needed_bytes, available_bytes: the bytes that the op needs at once, and those that it may have.
        smallest_bytes: the smallest budget of that tier that fits; 0 where it is not known.
        fixed_bytes: the part of `needed_bytes` that the process takes in addition to chunks and tensors.
    """

    def __init__(
        self,
        message: str,
        *,
        tier: str,
        moment: str = "",
        needed_bytes: int = 0,
        available_bytes: int = 0,
        smallest_bytes: int = 0,
        fixed_bytes: int = 0,
    ) -> None:
        super().__init__(message)
        self.tier = tier
        self.moment = moment
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.smallest_bytes = smallest_bytes
        self.fixed_bytes = fixed_bytes


class ConfigError(Error):
    """An argument, key, flag or optimizer that is not taken: which, what is allowed, the nearest spelling.

    Attributes:
        problems: each problem by itself, where the message tells several.
    """

    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


class LayoutError(Error):
    """Parameters that cannot be laid out in chunks."""


class StateError(Error):
    """A call at the wrong time; the message says what to do instead."""


class CheckpointError(Error):
    """A checkpoint or weights file that is damaged, incomplete, or of another model."""


class DeviceError(Error):
    """A device or a disk directory that does not do its work: file, offset and bytes where there are such."""


class RankError(Error):
    """A rank that is gone, does not answer, or does something else than the others. After it only `close()` works.

    Attributes:
        ranks: the ranks that it is about; none where it is not known.
        action: what was under way, as `gather layers.3`; "" where nothing was.
        reason: what has become of those ranks, without what to do about it.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), action: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.action = action
        self.reason = reason


class RankLost(RankError):  # noqa: N818  (a loss, which the job survives)
    """A rank that an elastic job has lost in the middle of a step: `with parts:` ends the step, and the next one goes on without that rank."""


def some(texts: Sequence[str], *, most: int, separator: str = ", ") -> str:
    """The first of these texts, and how many there are besides: `a, b and 7 more`."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean "bf16"?` for the closest of the known words, whatever their case, or an empty string."""
    by_lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(word.lower(), list(by_lower), n=1)
    return f'; did you mean "{by_lower[found[0]]}"?' if found else ""
