"""Making a plan from a trace. At each moment: make room, carry that out on the state, note what the moment did.

One pass, with an eviction order kept sorted as units are used. Two more let transfers begin before they are needed (`plan/overlap.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from patrickstar.core.layout import Layout
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Touch, Trace
from patrickstar.plan.actions import Action, Issue, Wait
from patrickstar.plan.eviction import POLICIES, Ranking, Uses
from patrickstar.plan.fit import expect_room, refuse_host, worst_moment
from patrickstar.plan.make_room import NoRoom, capacity_of, make_room
from patrickstar.plan.overlap import overlap, overlap_disk
from patrickstar.plan.placement import refuse_unless_homes_fit
from patrickstar.plan.plan import Plan, frees_by_moment
from patrickstar.plan.residency import Residency, apply, mark_moment

# Note [Steps that repeat each other]
#
# A plan is for the state in which its stretch begins, and a stretch that follows itself should have one plan, made once. By Belady's rule alone
# states may repeat after hundreds of steps or never. From the seventh plan on, therefore, nothing is there when a step ends that was not there when
# it began, but for what its last moment uses: what stays can only become less, until it is the same. Of a step of several forwards each has six.
_FREE_PLANS: Final = 6

_SPARE: Final = 8
"""Of so many slots one is left free, where something has to leave: what comes early needs it. More of them move more bytes."""


def must_repeat(earlier: int, *, trace: Trace, following: Trace | None) -> bool:
    """Tells whether a stretch of which so many plans have been made, from other states, is to end as it begins."""
    return earlier >= _FREE_PLANS and (following is None or following is trace)


@contextmanager
def garbage_waits(*, collects: bool = False) -> Iterator[None]:
    """A context in which nobody looks for garbage. `collects`: what is made inside is looked through as it ends, in milliseconds.

    A plan has as many small objects as moments and actions, and no cycles. The collector would go through all that the process holds, several
    times: a third of the time of a large plan.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
            if collects:
                gc.collect(0)  # the youngest generation, in which all of it is


@garbage_waits()
def make_plan(
    trace: Trace,
    *,
    layout: Layout,
    machine: Machine,
    start: Residency,
    policy: str = "next-use",
    following: Trace | None = None,
    frees: Iterable[tuple[int, PlaneRef]] = (),
    prefetch: int | None = 0,
    goes_down: Collection[PlaneRef] = (),
    repeats: bool = False,
) -> Plan:
    """The plan for one stretch: a forward and backward, or one optimizer step.

    Args:
        start: where every unit is now; not changed.
        following: the stretch expected next, after which this one is expected again. None: this one at once.
        frees: (moment, unit): what nobody wants any more once that moment is over.
        prefetch: by how many moments at most transfers begin before they are needed; None: as early as slots are free.
        goes_down: what will be used on the tier below after the end, and not before that on any other; it may begin to go there early.
        repeats: whether the end is to be as the beginning, so that the next such stretch has the same plan. See Note [Steps that repeat each other].

    Raises:
        BudgetError: some moment needs more of the compute tier than its budget, or homes do not fit the tiers below;
            the message names the moment that needs most.
    """
    state, compute = start.copy(), machine.compute
    freed = tuple(sorted(frees))
    refuse_unless_homes_fit(machine, home=state.home, slots=state.slots, slot_bytes=state.slot_bytes)
    expect_room(worst_moment(trace, start=state, frees=freed), machine)
    stays = frozenset(state.taken[compute]) if repeats else frozenset[PlaneRef]()
    worth = POLICIES[policy](Uses(trace, following, goes_down=frozenset(goes_down), stays=stays))
    ranking = Ranking(state, worth=worth)
    freed_after = frees_by_moment(freed)
    before = state.snapshot()
    capacity = capacity_of(state, 0, host_bytes=machine.budget.get(Tier.HOST, 0))
    moments: list[tuple[Action, ...]] = []
    for index, moment in enumerate(trace.moments):
        done = freed_after.get(index, ())
        is_end = repeats and index == len(trace) - 1
        leaving = sorted(state.taken[compute].difference(stays, done)) if is_end else ()
        capacity[compute] = (machine.budget[compute] - moment.nonmodel_bytes) // state.slot_bytes
        spare = capacity[compute] // _SPARE if prefetch != 0 else 0
        touches = (*moment.touches, *map(Touch, moment.held)) if moment.held else moment.touches
        actions = list[Action]()
        if leaving or not _is_ready(state, touches, capacity):
            try:
                actions = make_room(
                    state, touches=touches, leaving=leaving, capacity=capacity, spare_slots=spare, order=ranking
                )
            except NoRoom as refusal:  # of the host below a device: the tier that computes has been looked at
                host_bytes = machine.budget[Tier.HOST]
                raise refuse_host(refusal.needed_slots, trace.name(index), state=state, host_bytes=host_bytes) from None
            # What is free after the moment may not be on its way then.
            landings = [Wait.copy(ref, flight[1]) for ref in done if (flight := state.flight(ref))]
            actions += [landing for landing in landings if landing not in actions]
        for action in actions:
            apply(state, action)
        mark_moment(state, moment, done)
        ranking.used(index, [touch.ref for touch in moment.touches], [action.of for action in actions] + [*done])
        if moment.updates is not None:  # what it writes, the moment has marked
            update = Issue.update(moment.updates, moment.update_tier or compute)
            actions += [update, Wait(update.work)]
        moments.append(tuple(actions))
    plan = Plan(layout.digest(), policy, machine, before, tuple(moments), state.snapshot(), freed)
    plan = overlap(plan, trace, moments_ahead=prefetch, goes_down=goes_down)
    return overlap_disk(plan, trace, moments_ahead=prefetch)


def _is_ready(state: Residency, touches: Iterable[Touch], capacity: Mapping[Tier, int]) -> bool:
    """Tells whether nothing has to happen before a moment with these touches."""
    return (
        not (state.stale[state.compute] or state.under_way)
        and all(state.slots_used[tier] <= slots for tier, slots in capacity.items())
        and all(touch.tier is None and state.is_newest(touch.ref, state.compute) for touch in touches)
    )
