"""Weights that are changed by hand while their masters are split: the master of a changed element is its new weight.

Of an operation in place nobody can tell afterwards which elements it has changed, so they are copied before and compared after. What has not
changed keeps its master, down to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from patrickstar.core.layout import Layout
from patrickstar.core.plane import REST, PlaneRef
from patrickstar.core.trace import Phase, Touch
from patrickstar.nn.bound import BoundParameter
from patrickstar.runtime.conductor import Conductor

__all__ = ["HandChanges"]


class Before(NamedTuple):
    """What a parameter's elements were, in slot order."""

    bound: BoundParameter
    values: Tensor


class HandChanges:
    """Carries changes of 16-bit weights into their masters."""

    def __init__(self, layout: Layout, conductor: Conductor) -> None:
        self._layout = layout
        self._conductor = conductor

    def before(self, parameters: Iterable[BoundParameter]) -> list[Before]:
        """These parameters, which are resident, may be written now."""
        with self._conductor.apart():
            return [Before(bound, self._values(bound).clone()) for bound in parameters if self._is_split(bound)]

    def after(self, before: Iterable[Before]) -> None:
        """They have been."""
        with self._conductor.lock, self._conductor.apart():
            for bound, values in before:
                changed = self._values(bound).view(torch.int16) != values.view(torch.int16)
                for part in self._layout.parts(bound.name):
                    mine = changed[part.tensor_start : part.tensor_start + part.stop - part.start]
                    if bool(mine.any()):
                        rest = PlaneRef(part.chunk, REST)
                        self._conductor.moment(Phase.STEP, bound.name, (Touch(rest, True),))
                        self._conductor.tensor(rest)[part.start : part.stop].masked_fill_(mine, 0)

    def _is_split(self, bound: BoundParameter) -> bool:
        return not bound.is_copied and PlaneRef(bound.ref.chunk, REST) in self._conductor.mover.state.home

    def _values(self, bound: BoundParameter) -> Tensor:
        return self._conductor.tensor(bound.ref)[bound.offset : bound.offset + bound.shape_only.numel()]
