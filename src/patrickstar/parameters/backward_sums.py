"""Gradients that come in several parts within one backward: autograd adds them in the parameter's type, whatever several backwards add up in."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from patrickstar.memory.readiness import CopyStreams


class BackwardSums(dict[str, Tensor]):
    """Sums so far, by parameter or tile: of the backward that is under way, or of those that wait for other ranks. Parts may come on any stream."""

    def __init__(self) -> None:
        super().__init__()
        self._streams = CopyStreams()

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds a part of a gradient to its sum; the first part becomes the sum."""
        if name in self:
            self._streams.use(name, self[name])
            self[name].add_(gradient)
        else:
            self[name] = gradient
        self._streams.written(name, self[name])

    def take(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """All sums, or those of some parameters, which are not kept after that."""
        taken = {name: self.pop(name) for name in list(self if names is None else names) if name in self}
        for name, gradient in taken.items():
            self._streams.use(name, gradient)
        return taken

    def drop(self, names: Iterable[str]) -> None:
        """Drops the sums of these parameters and tiles."""
        for name in names:
            self.pop(name, None)
