"""Changes in place, by hand or by a forward, of weights whose masters are split: the master of a changed element is its new weight.

Of an operation in place nobody can tell afterwards which elements it has changed, so elements are copied before and compared after. What has not
changed keeps its master, down to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from patrickstar.core.layout import Part
from patrickstar.core.planes import REST, PlaneRef
from patrickstar.errors import Error
from patrickstar.optim.masters import BLOCK_NUMEL
from patrickstar.parameters.bound import BoundParameter
from patrickstar.plan.touches import Touches
from patrickstar.step.executor import Executor


@dataclass(frozen=True, slots=True)
class MastersByHand:
    """Carries changes of 16-bit weights into their masters (`parameters.owner.Rewriting`)."""

    executor: Executor
    touches: Touches

    def keeps_more(self, bound: BoundParameter) -> bool:
        """Tells whether a parameter's master is split, and the parameter shows the upper half itself."""
        return not bound.is_copied and self.touches.keeps_rest(bound.name)

    def carry(self, bound: BoundParameter, before: Tensor | None) -> None:
        """Carries changed elements of a resident parameter into its master. `before`: what its elements were; None: all of them have changed.

        Where a part of the master cannot be reached, the elements of that part are put back to what they were.
        """
        moments = self.touches.master(bound.name)
        with self.executor.lock, self.executor.apart():
            for number, (part, touches) in enumerate(moments):
                try:
                    self.executor.moment(self.executor.change_phase(), bound.name, touches)
                except Error:
                    if before is not None:
                        for left, _ in moments[number:]:
                            self._weight(left).copy_(_piece(before, left))
                    raise
                self._carry(part, before)

    def _carry(self, part: Part, before: Tensor | None) -> None:
        rest = self.executor.store.tensor(PlaneRef(part.chunk, REST))[part.start : part.stop]
        if before is None:
            rest.zero_()
            return
        pieces = (tensor.split(BLOCK_NUMEL) for tensor in (self._weight(part), _piece(before, part), rest))
        for now, was, lacks in zip(*pieces, strict=True):
            lacks.masked_fill_(now.view(torch.int16) != was.view(torch.int16), 0)

    def carry_if_changed(self, bound: BoundParameter, before: Tensor) -> None:
        """Carries elements of a resident parameter into its master where they are not as `before`."""
        with self.executor.apart():
            now = self.executor.store.tensor(bound.ref)[bound.offset : bound.offset + before.numel()]
            is_changed = not torch.equal(now.view(torch.int16), before.view(torch.int16))
        if is_changed:
            self.carry(bound, before)

    def _weight(self, part: Part) -> Tensor:
        ref, start = self.touches.layout.weight_place(part)
        return self.executor.store.tensor(ref)[start : start + part.stop - part.start]


def _piece(flat: Tensor, part: Part) -> Tensor:
    """The elements of a part, out of those of its parameter."""
    return flat[part.tensor_start : part.tensor_start + part.stop - part.start]
