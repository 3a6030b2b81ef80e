"""Masters of what uses see: copies of weights in the type that computes, and changes by hand of these and of weights whose masters are split.

Of an operation in place nobody can tell afterwards which elements it has changed, so elements are compared with what they were. The master of a
changed element is its new value; what has not changed keeps its master, down to the last bit. See Note [Copies] in `memory/leases.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from patrickstar.core.layout import Part
from patrickstar.core.planes import REST, PlaneRef
from patrickstar.core.trace import Phase, Touch
from patrickstar.errors import Error
from patrickstar.optim.masters import BLOCK_NUMEL, Scratch, blocks, rest_type, split
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import BoundParameter
from patrickstar.plan.touches import Touches
from patrickstar.step.executor import Executor


@dataclass(eq=False)
class Masters:
    """Makes copies, and carries changes into masters.

    Made before the binding, which is given afterwards. `rounding`: the type a master is rounded to for a copy, where its plane is fp32.
    """

    executor: Executor
    touches: Touches
    rounding: torch.dtype | None = None
    binding: Binding = field(init=False)

    def __post_init__(self) -> None:
        # For a value that has 16 bits and computes in fp32.
        self._scratch = None if self.rounding is None else Scratch(self.rounding)
        if self._scratch is not None:
            self._scratch.blocks(torch.device("cpu"))  # made now, when nobody counts what a step makes

    def make(self, name: str) -> Tensor:
        """A copy of a parameter or tile whose units are resident: 1-D, in slot order."""
        bound = self.binding.records[name]
        with self.executor.lock, self.executor.quiet():
            copy = torch.empty(bound.shape_only.numel(), dtype=bound.shape_only.dtype, device=self.binding.device)
            for part in self.touches.layout.parts(name):
                self._convert(self._weight(part), _piece(copy, part))
            return copy

    def renew(self, name: str, copy: Tensor) -> None:
        """Writes a parameter's value into a copy of it."""
        state = self.executor.store.state
        with self.executor.lock, self.executor.apart():
            for part in self.touches.layout.parts(name):
                ref, _ = self.touches.layout.weight_place(part)
                if not state.is_newest(ref, state.compute):
                    self.executor.moment(Phase.STEP, name, (Touch(ref),))
                self._convert(self._weight(part), _piece(copy, part))
            self.binding.leases.copy_written(name, copy)

    def changed(self, name: str) -> None:
        """A copy has been written in place: the master of a changed element is what was written, and the copy shows it rounded."""
        copy = self.binding.access.lease(name)
        with self.executor.lock, self.executor.apart():
            for part, touches in self.touches.master(name):
                try:
                    self.executor.moment(self.executor.change_phase(), name, touches)
                except Error:
                    self.binding.leases.forget(name)  # the next use is given a copy of what is kept
                    raise
                is_split = any(touch.ref.plane == REST for touch in touches)
                self.take_changes(_piece(copy, part), part, is_split=is_split)
                self._convert(self._weight(part), _piece(copy, part))

    def take_changes(self, copy: Tensor, part: Part, *, is_split: bool) -> None:
        """Has what was written into a copy of a part, whose units are resident, be the masters of the elements that have changed."""
        kept, rest = self._weight(part), self._rest(part) if is_split else None
        bits = torch.int16 if copy.dtype.itemsize == 2 else torch.int32
        for block in blocks(copy.numel()):
            before = torch.empty_like(copy[block])
            self._convert(kept[block], before)
            changed = before.view(bits) != copy[block].view(bits)
            if not bool(changed.any()):
                continue
            value = copy[block].to(torch.float32)
            if kept.dtype is torch.float32:
                kept[block].copy_(torch.where(changed, value, kept[block]))
                continue
            weight, left = torch.empty_like(kept[block]), torch.empty_like(value, dtype=rest_type(kept.dtype))
            split(value, weight, left)
            kept[block].copy_(torch.where(changed, weight, kept[block]))
            if rest is not None:
                rest[block].copy_(torch.where(changed, left, rest[block]))

    def _convert(self, kept: Tensor, copy: Tensor) -> None:
        if self._scratch is None or copy.dtype is self.rounding:
            copy.copy_(kept)
            return
        (whole,) = self._scratch.blocks(copy.device)
        for block in blocks(copy.numel()):
            rounded = whole[: block.stop - block.start].copy_(kept[block])
            copy[block].copy_(rounded)

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
        if before is None:
            self._rest(part).zero_()
            return
        pieces = (tensor.split(BLOCK_NUMEL) for tensor in (self._weight(part), _piece(before, part), self._rest(part)))
        for now, was, lacks in zip(*pieces, strict=True):
            lacks.masked_fill_(now.view(torch.int16) != was.view(torch.int16), 0)

    def _weight(self, part: Part) -> Tensor:
        ref, start = self.touches.layout.weight_place(part)
        return self.executor.store.tensor(ref)[start : start + part.stop - part.start]

    def _rest(self, part: Part) -> Tensor:
        return self.executor.store.tensor(PlaneRef(part.chunk, REST))[part.start : part.stop]


def _piece(flat: Tensor, part: Part) -> Tensor:
    return flat[part.tensor_start : part.tensor_start + part.stop - part.start]
