"""Updates of whole chunks in a backward: where their gradients find room to wait for each other.

    parameters     a: update c0   b: update c0   x   c: update c1
    whole chunks   a: c0.grad*    b: c0.grad*    U0   x   c: c1.grad*   U1

Where there is room, a gradient goes into a unit of its chunk, on the tier that computes, and the chunk is updated when its last gradient of this
backward has come. The unit is let go of when the next chunk is updated, and never leaves: it has no home below. Below a device, a chunk whose states
rest on the host is updated there (`plan/update_choice.py`): its gradient goes down as soon as it is complete.

Room is enough where, at every moment at which such a unit is there, the largest update would fit as well: so what a backward that leaves its trace
has waiting can be updated at once. What does not fit is updated parameter by parameter: no budget becomes larger.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from patrickstar.core.machine import Tier
from patrickstar.core.planes import EXP_AVG, GRAD, PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.plan.residency import Residency
from patrickstar.plan.touches import on_tier


@dataclass(frozen=True, slots=True)
class WholeChunks:
    """A forward and backward in which some chunks are updated whole.

    Attributes:
        trace: with a moment for the update of each of them. frees: as `make_plan` takes them.
        slots, homes: of each gradient's unit. arrivals: by chunk, how many moments bring a part of its gradient.
    """

    trace: Trace
    frees: tuple[tuple[int, PlaneRef], ...]
    slots: Mapping[PlaneRef, int]
    homes: Mapping[PlaneRef, Tier]
    arrivals: Mapping[int, int]


def update_whole_chunks(
    trace: Trace,
    *,
    state: Residency,
    slots_of_gradient: Callable[[int], int],
    capacity_bytes: int,
    choose_places: Callable[[Trace, Residency], tuple[Residency, Mapping[int, Tier]]] = lambda _, state: (state, {}),
) -> WholeChunks | None:
    """The trace with as many chunks updated whole as find room, the last ones first; None where none does.

    Args:
        trace: of a forward and backward in which parameters are updated as their gradients arrive.
        state: where units are; sizes and homes are what counts. slots_of_gradient: by chunk. capacity_bytes: of the tier that computes.
        choose_places: where such updates are done, and gradients rest; it is given them in order, and a state with gradients where computed.
    """
    came = _arrivals(trace, state)
    slots = {chunk: slots_of_gradient(chunk) for chunk in came}
    until = _choose(trace, came, slots, state, capacity_bytes)
    if not until:
        return None
    grown, units = state.copy(), {PlaneRef(chunk, GRAD): slots[chunk] for chunk in until}
    grown.grow(dict.fromkeys(units, state.compute), units)
    in_order = sorted(until, key=lambda chunk: came[chunk][-1])
    lasts = {chunk: trace.moments[came[chunk][-1]] for chunk in in_order}
    updates = {
        chunk: replace(last, phase=Phase.STEP, touches=(*last.touches, Touch(PlaneRef(chunk, GRAD))), updates=chunk)
        for chunk, last in lasts.items()
    }
    grown, tiers = choose_places(Trace(tuple(updates.values())), grown)
    moments: list[Moment] = []
    updated_at: dict[int, int] = {}
    arriving = {index: chunk for chunk in until for index in came[chunk]}
    for index, moment in enumerate(trace.moments):
        chunk = arriving.get(index)
        if chunk is None:
            moments.append(moment)
            continue
        gradient = PlaneRef(chunk, GRAD)
        moments.append(replace(moment, touches=(Touch(gradient, True),)))
        if index == came[chunk][-1]:
            updated_at[index] = len(moments)
            moments.append(on_tier(updates[chunk], tiers.get(chunk)))
    # What an update elsewhere has read is of no use here until the next.
    ends = {chunk: came[chunk][-1] if chunk in tiers else last for chunk, last in until.items()}
    frees = tuple((updated_at[last], PlaneRef(chunk, GRAD)) for chunk, last in ends.items())
    homes = {ref: grown.home[ref] for ref in units}
    return WholeChunks(Trace(tuple(moments)), frees, units, homes, {chunk: len(came[chunk]) for chunk in until})


def _arrivals(trace: Trace, state: Residency) -> dict[int, list[int]]:
    """Moments in which gradients arrive, by chunk: of chunks all of whose gradients are used at once, and have no home below.

    Nor is what somebody holds as the last one comes updated whole: a block that is open for other parameters of the run, for one.
    """
    found: dict[int, list[int]] = defaultdict(list)
    for index, moment in enumerate(trace.moments):
        if moment.phase is Phase.BACKWARD:  # a gradient that updates its chunk touches its states
            for chunk in [touch.ref.chunk for touch in moment.touches if touch.ref.plane == EXP_AVG]:
                found[chunk].append(index)
    kept = {ref.chunk for ref in trace.touched(GRAD)}
    return {
        chunk: at
        for chunk, at in found.items()
        if chunk not in kept
        and state.home.get(PlaneRef(chunk, GRAD), state.compute) is state.compute
        and _touched(trace.moments[at[-1]]).isdisjoint(trace.moments[at[-1]].held)
    }


def _choose(
    trace: Trace, came: Mapping[int, list[int]], slots: Mapping[int, int], state: Residency, capacity_bytes: int
) -> dict[int, int]:
    """The chunks that find room, each with the arrival after which the gradient's unit is let go of: that of the next update, or the chunk's own."""
    at_home = state.at_home()
    largest = max((_passing(trace.moments[at[-1]], state, at_home) for at in came.values()), default=0)
    room = [
        (capacity_bytes - moment.nonmodel_bytes) // state.slot_bytes
        - sum(state.slots[ref] for ref in moment.held if ref not in at_home and ref not in _touched(moment))
        - max(largest, _passing(moment, state, at_home))
        for moment in trace.moments
    ]
    rest = sum(state.slots[ref] for ref in at_home)
    until: dict[int, int] = {}
    following = None
    for chunk in sorted(came, key=lambda chunk: came[chunk][-1], reverse=True):
        first, last = came[chunk][0], came[chunk][-1]
        for end in (last if following is None else following, last):
            if min(room[first : end + 1]) >= rest + slots[chunk]:
                for index in range(first, end + 1):
                    room[index] -= slots[chunk]
                until[chunk], following = end, last
                break
    return until


def _touched(moment: Moment) -> set[PlaneRef]:
    return {touch.ref for touch in moment.touches}


def _passing(moment: Moment, state: Residency, at_home: set[PlaneRef]) -> int:
    """Slots of the tier that computes that a moment needs for what it touches there."""
    return sum(
        state.slots[touch.ref]
        for touch in moment.touches
        if touch.tier in (None, state.compute) and touch.ref not in at_home
    )
