"""What waits for the end of a backward: gradients that come in several parts, which autograd adds in the parameter's type."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

__all__ = ["BackwardSums"]


class BackwardSums:
    """The sums so far of the backward that is under way, by parameter or tile, and what is to be done at the end of each that is nested in it."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._ends: dict[int, list[Callable[[], None]]] = {}

    def at_end(self, backward: int, callback: Callable[[], None] | None) -> None:
        """The backward of this number is to end with this, if with anything."""
        if callback is not None:
            self._ends.setdefault(backward, []).append(callback)

    def end(self, backward: int) -> None:
        """It ends."""
        for callback in self._ends.pop(backward, ()):
            callback()

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds a part to the sum; the first one becomes it."""
        if name in self._sums:
            self._sums[name].add_(gradient)
        else:
            self._sums[name] = gradient

    def take(self) -> dict[str, Tensor]:
        """The backward has ended, and all that were nested in it: the sums, which are kept no longer."""
        self._ends.clear()  # of one that an exception has left
        sums, self._sums = self._sums, {}
        return sums

    def drop(self, names: Iterable[str]) -> None:
        """These are not wanted."""
        for name in names:
            self._sums.pop(name, None)
