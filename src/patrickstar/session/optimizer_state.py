"""The optimizer's state as whole tensors, in the format of torch's own classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ
from patrickstar.errors import BudgetError
from patrickstar.memory.leases import AssembledKey
from patrickstar.optim.state import State, pack, unpack
from patrickstar.parameters.assembled import STEP
from patrickstar.session.parts import Parts
from patrickstar.units import format_bytes

__all__ = ["OptimizerState"]


class OptimizerState:
    """Reads moments and counts of updates into a state dict, and takes them over from one.

    Args:
        parts: of the session. groups: the optimizer's parameter groups.
    """

    def __init__(self, parts: Parts, groups: list[dict[str, Any]]) -> None:
        self._parts = parts
        self._names = parts.binding.names
        self._weights = parts.weights
        self._steps = parts.steps
        self._groups = groups

    def whole(self, *, room_bytes: int | None) -> dict[str, Any]:
        """The state dict. `room_bytes`: bytes that the dict may take; None: no bound.

        Raises:
            BudgetError: it takes more.
        """
        needed = sum(2 * 4 * self._parts.named[name].numel() for name in self._steps)
        if room_bytes is not None and needed > room_bytes:
            raise BudgetError(
                f"the optimizer's state takes {format_bytes(needed)} as whole tensors, and {format_bytes(room_bytes)} of the host budget "
                "are free: use session.save_checkpoint(dir), which writes it a piece at a time",
                tier="host",
                needed_bytes=needed,
                available_bytes=room_bytes,
            )
        stretch = self._parts.executor.pilot.stretch
        stretch.reserve(needed)  # chunks make room for the whole tensors
        try:
            states = self.states()
        finally:
            stretch.reserve(-needed)
        return pack(self._groups, self._names, states)

    def states(self) -> dict[str, State]:
        """Count and moments by parameter name, each a copy."""
        return {
            name: State(count, self._weights.read_average(name, EXP_AVG), self._weights.read_average(name, EXP_AVG_SQ))
            for name, count in self._steps.items()
        }

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over moments and counts of updates, in place of all there were."""
        states = unpack(state_dict, self._groups, self._names)
        steps = self._steps
        for name in set(steps) - set(states):
            self._weights.clear_averages(name)
        steps.clear()
        for name, entry in states.items():
            self._weights.write_average(name, EXP_AVG, entry.exp_avg)
            self._weights.write_average(name, EXP_AVG_SQ, entry.exp_avg_sq)
            steps[name] = entry.step
            self._parts.binding.assembled.changed(AssembledKey(name, STEP))
