"""Weights that are changed in place while their masters are split, by hand or by a forward: the master of a changed element is its new weight.

Of an operation in place nobody can tell afterwards which elements it has changed, so they are copied before and compared after. What has not
changed keeps its master, down to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from patrickstar.core.layout import Part
from patrickstar.core.planes import REST, PlaneRef
from patrickstar.errors import Error
from patrickstar.optim.masters import BLOCK_NUMEL
from patrickstar.parameters.bound import BoundParameter
from patrickstar.plan.touches import Touches
from patrickstar.step.executor import Executor

__all__ = ["MastersByHand"]


class MastersByHand:
    """Carries changes of 16-bit weights into their masters (`parameters.owner.Rewriting`)."""

    def __init__(self, executor: Executor, touches: Touches) -> None:
        self._executor = executor
        self._touches = touches

    def keeps_more(self, bound: BoundParameter) -> bool:
        """Whether the parameter's master is split, and it shows the upper half itself."""
        return not bound.is_copied and self._touches.keeps_rest(bound.name)

    def carry(self, bound: BoundParameter, before: Tensor | None) -> None:
        """Elements of a resident parameter have been changed, of which `before` has what they were; None: all of them.

        Where a part of the master cannot be reached, its elements are put back to what they were.
        """
        moments = self._touches.master(bound.name)
        with self._executor.lock, self._executor.apart():
            for number, (part, touches) in enumerate(moments):
                try:
                    self._executor.moment(self._executor.change_phase(), bound.name, touches)
                except Error:
                    if before is not None:
                        for left, _ in moments[number:]:
                            self._weight(left).copy_(_piece(before, left))
                    raise
                self._carry(part, before)

    def _carry(self, part: Part, before: Tensor | None) -> None:
        rest = self._executor.store.tensor(PlaneRef(part.chunk, REST))[part.start : part.stop]
        if before is None:
            rest.zero_()
            return
        pieces = (tensor.split(BLOCK_NUMEL) for tensor in (self._weight(part), _piece(before, part), rest))
        for now, was, lacks in zip(*pieces, strict=True):
            lacks.masked_fill_(now.view(torch.int16) != was.view(torch.int16), 0)

    def carry_if_changed(self, bound: BoundParameter, before: Tensor) -> None:
        """The same of a parameter that may have been changed."""
        with self._executor.apart():
            now = self._executor.store.tensor(bound.ref)[bound.offset : bound.offset + before.numel()]
            is_changed = not torch.equal(now.view(torch.int16), before.view(torch.int16))
        if is_changed:
            self.carry(bound, before)

    def _weight(self, part: Part) -> Tensor:
        ref, start = self._touches.layout.weight_place(part)
        return self._executor.store.tensor(ref)[start : start + part.stop - part.start]


def _piece(flat: Tensor, part: Part) -> Tensor:
    """The part's elements of its parameter's."""
    return flat[part.tensor_start : part.tensor_start + part.stop - part.start]
