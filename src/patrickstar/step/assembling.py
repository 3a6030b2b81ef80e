"""Whole gradients and state of the optimizer, put together for a use and written back. See Note [Assembled tensors] in `parameters/assembled.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from patrickstar.core.cuda_blocks import block_bytes
from patrickstar.core.layout import Layout
from patrickstar.core.machine import Tier
from patrickstar.core.planes import GRAD, STEP, PlaneRef
from patrickstar.core.trace import Phase, Touch
from patrickstar.errors import BudgetError, StateError
from patrickstar.memory.leases import AssembledKey
from patrickstar.parameters.assembled import title
from patrickstar.parameters.binding import Binding
from patrickstar.plan.fit import refuse_parts
from patrickstar.step.executor import Executor
from patrickstar.step.gradients import Gradients
from patrickstar.step.values import Weights


@dataclass(frozen=True, slots=True)
class Assembling:
    """Reads whole tensors out of chunks, and writes them back. `steps`: updates so far, by parameter name."""

    binding: Binding
    layout: Layout
    executor: Executor
    gradients: Gradients
    weights: Weights
    steps: dict[str, int]

    def make(self, key: AssembledKey) -> Tensor:
        """The tensor for a key, put together: 1-D, in slot order. BudgetError: the tensor does not fit."""
        shape_only = self.binding.by_name[key.name].shape_only
        dtype = shape_only.dtype if key.plane == GRAD else torch.float32
        numel = 1 if key.plane == STEP else shape_only.numel()
        with self.executor.lock, self.executor.apart(), self._taking(key, numel * dtype.itemsize):
            flat = torch.empty(numel, dtype=dtype, device=self.binding.device)
            self.renew(key, flat)
            return flat

    def renew(self, key: AssembledKey, copy: Tensor) -> None:
        """Writes what is in chunks into a tensor that was put together."""
        with self.executor.lock, self.executor.apart():
            if key.plane == STEP:
                copy.fill_(float(self.steps[key.name]))
            elif key.plane == GRAD:
                self.gradients.copy_into(key.name, copy)
            else:
                self.weights.copy_into(key.name, key.plane, copy)
            self.binding.leases.copy_written(key, copy)

    def changed(self, key: AssembledKey, *, wholly: bool) -> None:
        """Writes a tensor that was put together, and has been written in place, back into its chunks.

        `wholly`: every element has been written, also those that are shown rounded and have the same bits as before.
        """
        copy = self.binding.leases.take_copy(key, self.make)
        with self.executor.lock, self.executor.apart():
            if key.plane == STEP:
                self.steps[key.name] = count_of(key, copy)
            elif key.plane == GRAD:
                self.gradients.write(self.binding.by_name[key.name], copy, wholly=wholly)
            else:
                self.weights.fill_from(key.name, copy, key.plane)

    def expect_room(self, key: AssembledKey) -> None:
        """Raises BudgetError where there is no room to put the tensor for a key together."""
        if key.plane == STEP or key in self.binding.leases.living():
            return
        bound, held = self.binding.by_name[key.name], self.binding.leases.held()
        itemsize = bound.shape_only.element_size() if key.plane == GRAD else torch.float32.itemsize
        with self.executor.lock, self._taking(key, bound.shape_only.numel() * itemsize):
            for part in self.layout.parts(key.name):
                self.executor.pilot.decided(Phase.STEP, key.name, (Touch(PlaneRef(part.chunk, key.plane)),), held)

    @contextmanager
    def _taking(self, key: AssembledKey, nbytes: int) -> Iterator[None]:
        """Leaves chunks less room while a tensor of `nbytes` is put together."""
        nbytes = block_bytes(nbytes, "cpu" if self.binding.device is None else self.binding.device.type)
        held = self.binding.leases.assembled_bytes()
        try:
            with self.executor.room.making(nbytes, is_budgeted=True):
                yield
        except BudgetError as refusal:
            taken = held + nbytes
            slots = refusal.needed_bytes - refusal.fixed_bytes
            parts = {"the tensor {}": nbytes, "others in use or held by views of them {}": held}
            raise refuse_parts(
                next(tier for tier in Tier if tier.label == refusal.tier),
                f"to put {title(key)} together",
                {**parts, "chunk slots in use at once {}": slots},
                budget_bytes=refusal.available_bytes + taken,
                fixed_bytes=self.executor.pilot.costs.beside(slots + taken),
                instead="one tensor at a time, without views of others (session.clip_grad_norm_(max_norm) needs one chunk at a time)",
                moment=refusal.moment,
            ) from refusal


def count_of(key: AssembledKey, value: Tensor) -> int:
    """The count of updates that a value is. StateError where the value is none."""
    count = float(value)
    if not (count >= 0 and count == int(count)):
        raise StateError(f"{title(key)} was set to {count:g}: it is a count of updates, a whole number from 0 on")
    return int(count)
