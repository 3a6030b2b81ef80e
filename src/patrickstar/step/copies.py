"""Copies of weights in the type that computes, where that is not the one they are kept in. See Note [Copies] in `memory/leases.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from patrickstar.core.layout import Part
from patrickstar.core.planes import REST, PlaneRef
from patrickstar.core.trace import Phase, Touch
from patrickstar.errors import Error
from patrickstar.optim.masters import Scratch, blocks, rest_type, split
from patrickstar.parameters.binding import Binding
from patrickstar.plan.touches import Touches
from patrickstar.step.executor import Executor
from patrickstar.step.precision import Precision


@dataclass(eq=False)
class Copies:
    """Makes copies, and carries what is changed in them back."""

    binding: Binding
    executor: Executor
    precision: Precision
    touches: Touches

    def __post_init__(self) -> None:
        # For a value that has 16 bits and computes in fp32.
        self._scratch = None if self.precision.rounding is None else Scratch(self.precision.rounding)
        if self._scratch is not None:
            self._scratch.blocks(torch.device("cpu"))  # made now, when nobody counts what a step makes

    def make(self, name: str) -> Tensor:
        """A copy of a parameter or tile whose units are resident: 1-D, in slot order."""
        bound = self.binding.records[name]
        with self.executor.lock, self.executor.quiet():
            copy = torch.empty(bound.shape_only.numel(), dtype=bound.shape_only.dtype, device=self.binding.device)
            for part in self.touches.layout.parts(name):
                self._convert(self._kept(part), copy[_span(part)])
            return copy

    def renew(self, name: str, copy: Tensor) -> None:
        """Writes a parameter's value into a copy of it."""
        state = self.executor.store.state
        with self.executor.lock, self.executor.apart():
            for part in self.touches.layout.parts(name):
                ref, _ = self.touches.layout.weight_place(part)
                if not state.is_newest(ref, state.compute):
                    self.executor.moment(Phase.STEP, name, (Touch(ref),))
                self._convert(self._kept(part), copy[_span(part)])
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
                kept, rest = self._kept(part), PlaneRef(part.chunk, REST)
                is_split = any(touch.ref == rest for touch in touches)
                left = self.executor.store.tensor(rest)[part.start : part.stop] if is_split else None
                self._take_changes(copy[_span(part)], kept, left)
                self._convert(kept, copy[_span(part)])

    def _take_changes(self, copy: Tensor, kept: Tensor, rest: Tensor | None) -> None:
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

    def _kept(self, part: Part) -> Tensor:
        ref, start = self.touches.layout.weight_place(part)
        return self.executor.store.tensor(ref)[start : start + part.stop - part.start]

    def _convert(self, kept: Tensor, copy: Tensor) -> None:
        if self._scratch is None or copy.dtype is self.precision.rounding:
            copy.copy_(kept)
            return
        (whole,) = self._scratch.blocks(copy.device)
        for block in blocks(copy.numel()):
            rounded = whole[: block.stop - block.start].copy_(kept[block])
            copy[block].copy_(rounded)


def _span(part: Part) -> slice:
    """The part's elements of its parameter or tile."""
    return slice(part.tensor_start, part.tensor_start + part.stop - part.start)
