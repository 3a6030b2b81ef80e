"""A session as its optimizer sees it: steps, and the state as whole tensors, in the format of torch's own classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from patrickstar.core.machine import Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ
from patrickstar.errors import BudgetError
from patrickstar.optim.state import State
from patrickstar.optim.user_optimizer import read_groups
from patrickstar.session.parts import Parts
from patrickstar.session.state_mapping import StateMapping
from patrickstar.units import format_bytes


@dataclass(frozen=True)
class OptimizerTarget:
    """A session as its optimizer sees it (`optim.managed.StepTarget`).

    Attributes:
        parts: of the session. original: the optimizer that was passed to `manage`.
    """

    parts: Parts
    original: torch.optim.Optimizer

    def step_groups(self) -> None:
        """The optimizer's step."""
        events = self.parts.events
        events.forget_abandoned_backward()
        events.check_watch()
        if self.parts.binding.is_whole:
            self.parts.binding.whole.take_back()
        self.parts.training.step()
        self.parts.sent.step_ended()
        if events.handed_out.watched:  # what is written to that memory from now on comes after this update
            self.parts.executor.settle()

    def zero_grad(self, set_to_none: bool) -> None:
        """The optimizer's `zero_grad`."""
        self.parts.events.forget_abandoned_backward()
        names = set(read_groups(self.original.param_groups, self.parts.binding.names))
        self.parts.training.zero_grad(set_to_none=set_to_none, names=names)

    @cached_property
    def optimizer_state(self) -> StateMapping:
        """The state by parameter, bound by use; one and the same mapping."""
        return StateMapping(self.parts, self.original)

    def optimizer_states(self) -> dict[str, State]:
        """The state by name, whole. BudgetError where it does not fit at once."""
        self.parts.begin_access()
        parts, budget = self.parts, self.parts.host_budget_bytes
        state, stretch = parts.executor.store.state, parts.executor.pilot.stretch
        needed = sum(2 * 4 * parts.named[name].numel() for name in parts.steps)
        # Below a device it is the host that things rest on, and where the host computes, the host as well; a few slots are in use.
        at_rest = sum(state.unit_bytes(ref) for ref, tier in state.home.items() if tier is Tier.HOST)
        room_bytes = None if budget is None else budget - at_rest - 2 * max(map(state.unit_bytes, state.home))
        if room_bytes is not None and needed > room_bytes:
            raise BudgetError(
                f"the optimizer's state takes {format_bytes(needed)} as whole tensors, and {format_bytes(room_bytes)} of the host budget "
                "are free: use session.save_checkpoint(dir), which writes it a piece at a time",
                tier="host",
                needed_bytes=needed,
                available_bytes=room_bytes,
            )
        stretch.reserve(needed)  # chunks make room for the whole tensors
        try:
            return states_of(parts)
        finally:
            stretch.reserve(-needed)

    def load_optimizer_states(self, states: Mapping[str, State]) -> None:
        """Takes over moments and counts of updates, in place of all there were."""
        self.parts.begin_access()
        for name in set(self.parts.steps) - set(states):
            self.parts.weights.clear_averages(name)
        self.parts.steps.clear()
        self.parts.take_states(states)


def states_of(parts: Parts) -> dict[str, State]:
    """Count and moments by parameter name, each a copy."""
    read = parts.weights.read
    return {name: State(count, read(name, EXP_AVG), read(name, EXP_AVG_SQ)) for name, count in parts.steps.items()}
