"""The choices that an update leaves: when it is done, and where. No bit depends on them.

Below a device, what an update of a chunk on the host needs of the link is its gradient on the way down and its weight on the way up. Where the
device has room for all that the update uses, beside all else that a step needs there, not even that crosses the link; so as many chunks as
have that room are updated on the device, and the others on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import GRAD, WEIGHT, PlaneRef
from patrickstar.core.trace import Trace
from patrickstar.plan.residency import Residency
from patrickstar.plan.room import capacity_of

__all__ = ["UpdateChoice", "choose_tiers"]


@dataclass(frozen=True, slots=True)
class UpdateChoice:
    """A choice of where and when chunks are updated.

    Attributes:
        apart: whether updates have a stretch of their own, and are not woven into the forward that follows.
        tier: the tier of a chunk's update, where it can be done there; None: as `choose_tiers` finds best, and where the step computes if apart.
    """

    apart: bool = False
    tier: Callable[[int], Tier] | None = None


def choose_tiers(
    updates: Trace, state: Residency, *, machine: Machine, peak_bytes: int, choice: UpdateChoice
) -> Mapping[int, Tier]:
    """The tiers, by chunk, of updates that are not done on the tier that computes.

    Args:
        updates: a moment for each, as if all were done where the step computes. state: where units rest.
        peak_bytes: the most non-model bytes of any moment of a step.
    """
    if state.compute is Tier.HOST or (choice.apart and choice.tier is None):
        return {}
    room = machine.budget[state.compute] - peak_bytes
    room -= sum(state.unit_bytes(ref) for ref in state.home if ref.plane in (WEIGHT, GRAD))
    found: dict[int, Tier] = {}
    for moment in updates.moments:
        assert moment.updates is not None, "a moment of no update"
        units = [touch.ref for touch in moment.touches]
        states = sum(state.unit_bytes(ref) for ref in units if ref.plane not in (WEIGHT, GRAD))
        wanted = choice.tier(moment.updates) if choice.tier else Tier.HOST if states > room else state.compute
        if wanted is Tier.HOST and _can_be_on_host(units, state, machine):
            found[moment.updates] = Tier.HOST
        else:
            room -= states
    return found


def _can_be_on_host(units: list[PlaneRef], state: Residency, machine: Machine) -> bool:
    """Tells whether an update of these units can be done on the host: none of them rests above it, and what rests below finds room there."""
    if any(state.home[ref] is state.compute for ref in units):
        return False
    passing = sum(state.slots[ref] for ref in units if state.home[ref] is Tier.DISK)
    return passing <= capacity_of(state, 0, host_bytes=machine.budget[Tier.HOST])[Tier.HOST]
