"""Overflow: which gradients have arrived with an Inf or NaN. On a device the host waits for that only when it asks."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Overflow"]


class Overflow:
    """The parameters whose gradients have overflowed, first come first."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}
        self._unread: list[tuple[str, Tensor]] = []  # flags on a device, in the order of arrival

    def note(self, name: str, is_finite: Tensor) -> None:
        """Notes what a look at a piece of a parameter's gradient has given (`Passes.is_finite`)."""
        if not is_finite.is_cpu:
            self._unread.append((name, is_finite))
        elif not bool(is_finite):
            self._found.setdefault(name)

    def forget(self, name: str) -> None:
        """Forgets a gradient, which has been let go or written anew."""
        self._found.pop(name, None)
        self._unread = [(other, flag) for other, flag in self._unread if other != name]

    def names(self) -> list[str]:
        """The names of those that have overflowed. Waits for a device once, where there is one."""
        if self._unread:
            unread, self._unread = self._unread, []
            for (name, _), is_finite in zip(unread, torch.stack([flag for _, flag in unread]).tolist(), strict=True):
                if not is_finite:
                    self._found.setdefault(name)
        return list(self._found)
