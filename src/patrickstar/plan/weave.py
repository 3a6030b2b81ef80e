"""Weaving: updates get a place among the moments of a forward and its backward.

The updates of a step come between the moments of the forward that follows it, each before the first moment that needs what it changes:

    updates    u0 u1 u2 u3
    trace         a  b  c  d      a uses what u0 changes, c what u1 and u2 change; nothing uses what u3 changes
    woven      u0 a  b  u1 u2 c  d   u3 goes before the last moment of the forward

An update on another tier than the one that computes comes as early as the one but one before it, so that its transfers have time. One that does not
fit beside what is alive at any moment of the forward comes before the first: so those that are left fit wherever another forward needs them.

In a backward that updates as gradients arrive, gradients of a chunk find room to wait for each other, and the chunk is updated whole:

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
from patrickstar.plan.fit import pinned_at
from patrickstar.plan.residency import Residency
from patrickstar.plan.touches import on_tier

_AHEAD = 2
"""Updates by which one that is not done where the step computes comes before its time."""


def weave(trace: Trace, updates: Trace, *, state: Residency, capacity_bytes: int, kept_bytes: int = 0) -> Trace:
    """The moments of both, in the order in which they come.

    Args:
        trace: of a forward, and of what follows. updates: a moment for each pending update.
        state: where units are; sizes and homes are what counts. capacity_bytes: of the tier that computes.
        kept_bytes: what kernels keep between their calls, for which room is left before the first moment as far as there is any.
    """
    later_first = reversed([*enumerate(trace.moments)])
    first_use = {touch.ref: at for at, one in later_first for touch in one.touches if needs_before(touch)}
    forward = [(index, moment) for index, moment in enumerate(trace.moments) if moment.phase is Phase.FORWARD]
    last = forward[-1][0] if forward else 0
    at_home = state.at_home()
    # Whatever is updated on another tier, and however little is alive: homes stay.
    room = capacity_bytes - sum(map(state.unit_bytes, at_home))
    # An update may need what a moment touches, but not what is held.
    needs = (one.nonmodel_bytes + sum(map(state.unit_bytes, {*one.held} - at_home)) for _, one in forward)
    alive = max(needs, default=0)
    before: dict[int, list[Moment]] = {}
    due = {
        update.updates: min((first_use[touch.ref] for touch in update.touches if touch.ref in first_use), default=last)
        for update in updates.moments
    }
    in_order = sorted(updates.moments, key=lambda update: due[update.updates])
    for number, update in enumerate(in_order):
        own = update.nonmodel_bytes + sum(state.unit_bytes(ref) for ref in pinned_at(update) if ref not in at_home)
        # What is updated elsewhere has to go there, and the weight has to come back.
        timely = update if update.update_tier is None else in_order[max(0, number - _AHEAD)]
        at = due[timely.updates] if own + alive <= room else 0
        kept = max(0, min(kept_bytes, room - own))
        before.setdefault(at, []).append(_as_at(update, trace, at, kept_bytes=kept))
    return Trace(tuple(one for at, moment in enumerate(trace.moments) for one in (*before.get(at, ()), moment)))


def needs_before(touch: Touch) -> bool:
    """Tells whether an update of the unit must be over before this touch: it reads what the update changes, or changes what that reads."""
    return touch.writes or touch.ref.plane != GRAD


def own_moments(woven: Trace) -> list[int]:
    """The numbers that the moments between which updates have been woven have among all."""
    return [index for index, moment in enumerate(woven.moments) if moment.updates is None]


def _as_at(update: Moment, trace: Trace, index: int, *, kept_bytes: int) -> Moment:
    """The update as a moment just before that of this number: what is alive and held then is so meanwhile."""
    moment, scratch = trace.moments[index], update.nonmodel_bytes
    if not index:
        return replace(update, nonmodel_bytes=kept_bytes + scratch, live_bytes=kept_bytes)
    before = trace.moments[index - 1]
    held = {*moment.held, *(touch.ref for touch in moment.touches if touch.ref in before.held)}
    live = moment.live_bytes
    return replace(update, held=tuple(held - _touched(update)), nonmodel_bytes=live + scratch, live_bytes=live)


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
