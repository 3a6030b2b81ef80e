"""The choices that an update leaves: when it is done, and where. No bit depends on them.

Below a device, what an update of a chunk on the host needs of the link is its gradient on the way down and its weight on the way up. Where the
device has room for all that the update uses, beside all else that a step needs there, not even that crosses the link; so as many chunks as
have that room are updated on the device, and the others on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import GRAD, WEIGHT, PlaneRef
from patrickstar.core.trace import Trace
from patrickstar.plan.make_room import capacity_of
from patrickstar.plan.residency import Residency


@dataclass(frozen=True, slots=True)
class UpdateChoice:
    """A choice of where and when chunks are updated.

    Attributes:
        apart: whether updates have a stretch of their own, and are not woven into the forward that follows.
        tier: the tier of a chunk's update, where it can be done there; None: as `choose_tiers` finds best, and where the step computes if apart.
    """

    apart: bool = False
    tier: Callable[[int], Tier] | None = None


def choose_places(
    updates: Trace, state: Residency, *, machine: Machine, peak_bytes: int, choice: UpdateChoice
) -> tuple[Residency, Mapping[int, Tier]]:
    """A copy of the state with homes for the gradients of updates in a backward; and the tiers, by chunk, of those not done where it computes.

    The state that is given has these gradients on the tier that computes. A gradient needs no home below, and gets one where its chunk is updated
    there: on the host, for as many chunks, from the first update on, as that has room for beside the rest.
    """
    found = state.copy()
    if state.compute is Tier.HOST or Tier.DISK in state.home.values():  # a host above a disk has its room filled
        return found, {}
    room = capacity_of(state, 0, host_bytes=machine.budget[Tier.HOST])[Tier.HOST]
    gradients = [touch.ref for moment in updates.moments for touch in moment.touches if touch.ref.plane == GRAD]
    for gradient in gradients:
        room -= state.slots[gradient]
        if room < 0:
            break
        found.grow({gradient: Tier.HOST}, {gradient: state.slots[gradient]})
    tiers = choose_tiers(updates, found, machine=machine, peak_bytes=peak_bytes, choice=choice, beside=(WEIGHT,))
    # What is updated on the tier that computes has its gradient there.
    back = [ref for ref in gradients if ref.chunk not in tiers]
    found.grow(dict.fromkeys(back, state.compute), {ref: state.slots[ref] for ref in back})
    return found, tiers


def choose_tiers(
    updates: Trace,
    state: Residency,
    *,
    machine: Machine,
    peak_bytes: int,
    choice: UpdateChoice,
    beside: Collection[str] = (WEIGHT, GRAD),
) -> Mapping[int, Tier]:
    """The tiers, by chunk, of updates that are not done on the tier that computes.

    Args:
        updates: a moment for each, as if all were done where the step computes. state: where units rest.
        peak_bytes: the most non-model bytes of any moment of a step. beside: the planes that are to find room beside these updates, whole.
    """
    if state.compute is Tier.HOST or (choice.apart and choice.tier is None):
        return {}
    room = machine.budget[state.compute] - peak_bytes
    room -= sum(state.unit_bytes(ref) for ref in state.home if ref.plane in beside)
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
