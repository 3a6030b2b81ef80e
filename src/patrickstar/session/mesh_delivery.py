"""Values of a model in blocks as files have them, each tensor whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from math import prod

import torch
from torch import Tensor

from patrickstar.session.delivery import Delivery, Kept
from patrickstar.session.mesh_tensors import MeshTensors


@dataclass(slots=True, eq=False)
class MeshDelivery(Delivery):
    """Reads whole tensors by the names that they have in files, of which each rank is sent all, in the order in which they are written."""

    tensors: MeshTensors = field(kw_only=True)
    _left: Iterator[tuple[str, Tensor]] = field(default=iter(()), init=False)
    _problem: Exception | None = field(default=None, init=False)

    def read(self, name: str) -> Iterator[Tensor]:
        """A tensor's elements in order, in contiguous 1-D pieces on the host."""
        source = self.sources[name]
        if isinstance(source, Tensor):
            yield from super().read(name)
            return
        numel = prod(self.tensors.shape(source.bound.name))
        while numel:
            other, strip = next(self._left)
            if other == name:
                numel -= len(strip)
                yield strip

    @contextmanager
    def rounds(self, names: Sequence[Sequence[str]]) -> Iterator[None]:
        """A context in which all ranks read; as that of `Delivery`."""
        self._problem, self._left = None, self._all(chain.from_iterable(names))
        try:
            yield
        except Exception as error:
            self._problem = error
        for _ in self._left:  # the others are to have all of it
            pass
        if self._problem is not None:
            raise self._problem

    def _all(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            if isinstance(source := self.sources[name], Kept):
                for strip in self.tensors.strips(source.bound.name, self._kept(source)):
                    yield name, strip

    def _kept(self, source: Kept) -> Tensor:
        if self._problem is None:
            try:
                return self.tensors.kept(source.bound.name, source.plane)
            except Exception as error:  # the others are to have theirs all the same
                self._problem = error
        return torch.zeros(source.bound.shape_only.shape, device="cpu")
