"""What becomes of blocks that are freed where the process has a bound: kept while plans leave room for them, returned at once from then on."""

from __future__ import annotations

import logging

from patrickstar.core.layout import Layout
from patrickstar.core.machine import Tier
from patrickstar.core.trace import Trace
from patrickstar.memory.allocator import Allocator, allocator, return_at_once
from patrickstar.plan.plan import Plan
from patrickstar.plan.simulate import simulate
from patrickstar.runtime.budgets import Budgets

__all__ = ["FreedBlocks"]

_log = logging.getLogger("patrickstar")


class FreedBlocks:
    """Makes the allocator return freed blocks at once as soon as a stretch needs the room that they would take.

    Blocks that are kept save the page faults of the next ones. What is kept has the room that chunks and activations leave, and `Pressure` asks
    for it before it would be too much; between two looks the allocator may take a little more than what is live, for which a plan must leave
    room. The allocator begins as it comes: making it return blocks is for the whole process and, under glibc, for good. So the first plan
    decides, and any later one that needs more.
    """

    def __init__(self, budgets: Budgets) -> None:
        machine = budgets.machine
        self._room_bytes = machine.budget[machine.compute]
        self._kept = budgets.host_binds and machine.compute is Tier.HOST
        self._allocator: Allocator | None = allocator() if self._kept else None

    def plan(self, plan: Plan, trace: Trace, layout: Layout) -> None:
        """A stretch is about to go as this plan has it."""
        if self._kept and not self._leaves_room(plan, trace, layout):
            self.return_at_once("a plan takes the room that they would be kept in")

    def return_at_once(self, why: str) -> None:
        """From now on no freed block is kept, for this reason. See decision 0002 for what that costs."""
        if not self._kept:
            return
        self._kept = False
        done = return_at_once()
        if done:
            _log.info(
                "%s at once, for the whole process and for good, since %s; steps take longer by the page faults",
                done,
                why,
            )

    def _leaves_room(self, plan: Plan, trace: Trace, layout: Layout) -> bool:
        """Whether the worst moment leaves what the allocator may take beyond what is live."""
        assert self._allocator is not None
        simulated = simulate(plan, trace, layout=layout, machine=plan.machine)
        beyond = int(trace.peak * self._allocator.overshoots)
        return simulated.peak[plan.machine.compute.label] + beyond <= self._room_bytes
