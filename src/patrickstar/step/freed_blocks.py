"""Blocks that are freed where the process has a bound: kept while plans leave room for them, returned at once from then on."""

from __future__ import annotations

import logging

from patrickstar.core.layout import Layout
from patrickstar.core.machine import Tier
from patrickstar.core.trace import Trace
from patrickstar.memory.allocator import Allocator, allocator, return_at_once
from patrickstar.plan.plan import Plan
from patrickstar.plan.simulate import Simulation, simulate
from patrickstar.step.budgets import Budgets
from patrickstar.step.pressure import EARLY_BYTES

__all__ = ["FreedBlocks", "KeptBlocks"]

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
        """Decides for a stretch that is about to go as this plan has it."""
        if self._kept and not self._leaves_room(plan, trace, layout):
            self.return_at_once("a plan takes the room that they would be kept in")

    def return_at_once(self, why: str) -> None:
        """Makes the allocator keep no freed block from now on, for this reason. See decision 0002 for what that costs."""
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
        assert self._allocator is not None
        simulated = simulate(plan, trace, layout=layout, machine=plan.machine)
        return leaves_room(simulated, trace, plan.machine.compute, room_bytes=self._room_bytes, found=self._allocator)


def leaves_room(simulated: Simulation, trace: Trace, compute: Tier, *, room_bytes: int, found: Allocator) -> bool:
    """True where the worst moment of a plan leaves what the allocator may take beyond what is live."""
    return simulated.peak[compute.label] + int(trace.peak * found.overshoots) <= room_bytes


class KeptBlocks:
    """Adds up, over the plans of a run, what the process is to take beyond their peak because freed blocks are kept."""

    def __init__(self, budgets: Budgets) -> None:
        self._compute = budgets.machine.compute
        self._room_bytes = budgets.machine.budget[self._compute]
        self._kept = budgets.host_binds and self._compute is Tier.HOST
        self._allocator = allocator()
        self._slot_bytes = self._peak = self._activations = 0

    def add(self, simulated: Simulation, trace: Trace, *, slot_bytes: int) -> None:
        """Takes in a plan, as it was simulated."""
        room = self._room_bytes
        self._kept = self._kept and leaves_room(simulated, trace, self._compute, room_bytes=room, found=self._allocator)
        self._slot_bytes = max(self._slot_bytes, max(simulated.slots, default=0) * slot_bytes)
        self._peak = max(self._peak, simulated.peak[self._compute.label])
        self._activations = max(self._activations, trace.peak)

    @property
    def nbytes(self) -> int:
        """Bytes beyond the peak: as the allocator comes, or up to where `Pressure` asks for what it keeps."""
        if not self._kept:
            return 0
        as_it_comes = self._slot_bytes + int(self._activations * self._allocator.retains)
        return max(0, min(as_it_comes, self._room_bytes + EARLY_BYTES) - self._peak)
