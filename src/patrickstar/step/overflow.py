"""Overflow: which gradients have arrived with an Inf or NaN. On a device the host waits for that only when it asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Overflow", "OverflowFlag", "names_of", "read"]


@dataclass(slots=True, eq=False)
class OverflowFlag:
    """The answer to a look at a piece of a parameter's gradient. `on_device`: the answer there, until the host has read it."""

    name: str
    on_device: Tensor | None
    is_finite: bool = True

    @classmethod
    def of(cls, name: str, is_finite: Tensor) -> OverflowFlag:
        """A flag of no dimensions, read at once where it is on the host."""
        if not is_finite.is_cpu:
            return cls(name, is_finite)
        return cls(name, None, bool(is_finite))


def read(flags: Iterable[OverflowFlag], numbers: Tensor | None = None) -> list[float]:
    """Reads what is still on a device, and numbers beside it (1-D, fp64), which are given: the host waits once for all of them."""
    unread = [flag for flag in flags if flag.on_device is not None]
    found = [flag.on_device for flag in unread if flag.on_device is not None]
    if not found:
        return [] if numbers is None else numbers.tolist()
    answers = torch.stack(found)
    values = answers.tolist() if numbers is None else torch.cat([answers.to(numbers.dtype), numbers]).tolist()
    for flag, value in zip(unread, values, strict=False):
        flag.on_device, flag.is_finite = None, bool(value)
    return values[len(unread) :]


def names_of(flags: Sequence[OverflowFlag]) -> list[str]:
    """The names of those that have overflowed, first come first. Waits for a device once, where something is still there."""
    read(flags)
    return list(dict.fromkeys(flag.name for flag in flags if not flag.is_finite))


class Overflow:
    """The parameters whose gradients have overflowed, as far as they are still there."""

    def __init__(self) -> None:
        self._flags: list[OverflowFlag] = []

    def note(self, name: str, is_finite: Tensor) -> None:
        """Notes what a look at a piece of a parameter's gradient has given (`Passes.is_finite`)."""
        flag = OverflowFlag.of(name, is_finite)
        if flag.on_device is not None or not flag.is_finite:
            self._flags.append(flag)

    def forget(self, name: str) -> None:
        """Forgets a gradient, which has been let go or written anew."""
        self._flags = [flag for flag in self._flags if flag.name != name]

    def flags(self) -> list[OverflowFlag]:
        """The flags so far, read or not, but for those of pieces that are known to be finite."""
        self._flags = [flag for flag in self._flags if flag.on_device is not None or not flag.is_finite]
        return list(self._flags)
