"""A step for which the device has not the memory that its budget promises: an error that says so, and more room the next time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from patrickstar.errors import BudgetError
from patrickstar.plan.stretch import StretchKind
from patrickstar.step.budgets import Budgets
from patrickstar.step.executor import Executor
from patrickstar.step.room import DeviceRoom
from patrickstar.units import format_bytes


@dataclass(frozen=True, eq=False)
class OutOfMemory:
    """Raises in the place of torch, where a device has no memory in the middle of a step. `budgets`: of a session that computes there."""

    executor: Executor
    room: DeviceRoom
    budgets: Budgets

    def __call__(self, asked_bytes: int, free_bytes: int, total_bytes: int) -> None:
        """Raises BudgetError where a forward or backward of this session is under way."""
        stretch, store = self.executor.pilot.stretch, self.executor.store
        if stretch.is_over or stretch.kind not in {StretchKind.TRAINING, StretchKind.EVALUATION}:
            return
        tier = store.state.compute
        slots = store.units.committed_slots * store.state.slot_bytes
        allocated = torch.accelerator.memory_allocated(self.budgets.device)
        others = max(0, total_bytes - free_bytes - slots - torch.accelerator.memory_reserved(self.budgets.device))
        position = max(0, stretch.position - 1)
        moment = f"{position} {stretch.kind}" if stretch.trace is None else stretch.trace.name(position)
        leaves = self.room.leave_room(asked_bytes)
        needed, budget = slots + allocated + asked_bytes, self.budgets.machine.given(tier)
        raise BudgetError(
            f"the device has no memory for {format_bytes(asked_bytes)} more after op {moment}, although {tier.label}_memory is "
            f"{format_bytes(budget)}: of {format_bytes(total_bytes)} {format_bytes(free_bytes)} are free, chunk slots have "
            f"{format_bytes(slots)}, torch's allocator has {format_bytes(allocated)} in use, and others {format_bytes(others)}\n"
            f"  the next step leaves {format_bytes(leaves)} to activations; give a smaller {tier.label}_memory or a smaller batch, or end "
            "other programs on the device",
            tier=tier.label,
            moment=moment,
            needed_bytes=needed,
            available_bytes=slots + allocated + free_bytes,
        )
