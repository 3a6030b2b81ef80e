"""Fixed costs: memory beside chunks and activations, of a process or of a device, as a part of the budget that its user gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from patrickstar.units import MIB

CONSTANT_BYTES: Final = 48 * MIB
"""Pages of libraries, imports, thread pools, what the allocator cannot give back: 31 to 44 MiB were measured."""
_PERCENT: Final = 1
"""Of what chunks and activations take: page tables, the rounding of blocks to pages."""
WORKSPACE_BYTES: Final = 256 * MIB
"""The least that is left for workspaces of kernels, where any is."""
GPU_WORKSPACE_PERCENT: Final = 3
"""Of a GPU's budget, what is left for them: by rule, measured on none."""


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """The part of a budget that is neither chunk nor activation.

    Budgets from the floor on hold it: what chunks and activations take, 1 % of that and 48 MiB are the budget. Below, where it would be most
    of them, the process takes it on top, up to the floor.

    Attributes:
        given_bytes: the budget as the user gave it. floor_bytes: the smallest that holds the costs; 0: they are not counted, whatever the budget.
    """

    given_bytes: int = 0
    floor_bytes: int = 0

    @property
    def room_bytes(self) -> int:
        """Bytes that chunks and activations may take of the budget that was given."""
        if self.given_bytes < self.floor_bytes:
            return min(self.given_bytes, _without(self.floor_bytes))
        return _without(self.given_bytes) if self.floor_bytes else self.given_bytes

    @property
    def set_aside_bytes(self) -> int:
        """Bytes of the budget that was given which chunks and activations may not take."""
        return self.given_bytes - self.room_bytes

    def beside(self, need_bytes: int) -> int:
        """Bytes on top of a need, in the smallest budget in which chunks and activations may take so much."""
        if not self.floor_bytes or need_bytes <= _without(self.floor_bytes):
            return 0
        return CONSTANT_BYTES + -(-need_bytes * _PERCENT // 100)


@dataclass(frozen=True, slots=True)
class WorkspaceCosts(FixedCosts):
    """The part of a device's budget that is left for workspaces of kernels: what they take and give back, and what libraries keep.

    No trace shows it. A step does, and then plans have what it took (`step/room.py`).

    Attributes:
        percent: of the budget, `WORKSPACE_BYTES` at least; 0: nothing is left.
    """

    percent: int = 0

    @property
    def room_bytes(self) -> int:
        if not self.percent:
            return self.given_bytes
        return max(0, self.given_bytes - max(WORKSPACE_BYTES, self.given_bytes * self.percent // 100))

    def beside(self, need_bytes: int) -> int:
        return max(WORKSPACE_BYTES, -(-need_bytes * self.percent // (100 - self.percent))) if self.percent else 0


def _without(budget_bytes: int) -> int:
    return (budget_bytes - CONSTANT_BYTES) * 100 // (100 + _PERCENT)
