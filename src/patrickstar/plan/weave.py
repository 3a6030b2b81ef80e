"""Weaving: the updates of a step between the moments of the forward that follows it, each before the first moment that needs what it changes.

    updates    u0 u1 u2 u3
    trace         a  b  c  d      a uses what u0 changes, c what u1 and u2 change; nothing uses what u3 changes
    woven      u0 a  b  u1 u2 c  d   u3 goes before the last moment of the forward

An update on another tier than the one that computes comes as early as the one but one before it, so that its transfers have time. One that does not
fit beside what is alive at any moment of the forward comes before the first: so those that are left fit wherever another forward needs them.
"""

from __future__ import annotations

from dataclasses import replace

from patrickstar.core.planes import GRAD
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.plan.fit import pinned_at
from patrickstar.plan.residency import Residency

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
    touched = {touch.ref for touch in update.touches}
    return replace(update, held=tuple(held - touched), nonmodel_bytes=live + scratch, live_bytes=live)
