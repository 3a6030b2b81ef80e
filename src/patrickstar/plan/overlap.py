"""Overlap: transfers of a plan that begin before they are needed, so that computing goes on meanwhile.

A plan as `make_plan` makes it issues each transfer at the moment that needs it, and waits for it there. Here the same actions are done at other
moments, and nothing else changes:

    hoist              a unit's copy to the tier that computes is issued at the earliest moment from which its slots are free until its use
    early write-back   what leaves dirty is copied home as soon as it has been written for the last time
    early drop         what leaves gives its slots back when it has been used for the last time; where it has to be written back before that,
                       only if something that is fetched early takes them
    late wait          an update is waited for when something needs what it uses, and its gradient's way there with it; what slots the gradient
                       still has above are given back then, if they are not needed before
    early descent      a gradient that will be used below begins to go there when it is complete, over the end of the plan

    moment      3                  4          5          6                          7
    before                                               a D>H, a H?, a D!, b H>D, b D?
    after       a D>H                         a H?, a D!, b H>D     b D?

The wait for an arrival stays at its use, and that for a write-back comes halfway between its issue and the use of the slots: what leaves has as much
time as what comes. Copies into one tier are issued in the order in which they are needed. Slots in use never exceed what the moment leaves them.

Only transfers between the tier that computes and the one below it are moved; those between host and disk below a device are the matter of
`plan/overlap_disk.py`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from patrickstar.core.machine import Tier
from patrickstar.core.planes import GRAD, WEIGHT, PlaneRef
from patrickstar.core.trace import Moment, Trace
from patrickstar.plan.actions import Action, Drop, Issue, Wait, WorkKind, is_copy, slots_taken
from patrickstar.plan.free_slots import FreeSlots
from patrickstar.plan.plan import Plan
from patrickstar.plan.residency import Residency, apply
from patrickstar.plan.snapshot import Snapshot

_TIERS = tuple(Tier)


def overlap(plan: Plan, trace: Trace, *, moments_ahead: int | None, goes_down: Collection[PlaneRef] = ()) -> Plan:
    """The plan with its transfers at most so many moments earlier; None: as early as they can be.

    Args:
        goes_down: what will be used on the tier below after the plan's end, and not before that on any other.
    """
    issued = (action.work.kind for action in plan.actions() if isinstance(action, Issue))
    if moments_ahead == 0 or not (goes_down or any(kind is not WorkKind.CREATE for kind in issued)):
        return plan
    return _Overlap(plan, trace, len(trace) if moments_ahead is None else moments_ahead).plan(goes_down)


@dataclass(slots=True)
class _Moved:
    """Actions that have come to a moment from later ones."""

    drops: list[Action] = field(default_factory=list)
    copies: list[Action] = field(default_factory=list)
    write_backs: list[Action] = field(default_factory=list)


class _Leaving(NamedTuple):
    """A dirty unit that leaves the tier that computes: its write-back, what ends that, from when it may leave, and when the write-back can begin."""

    copy: Issue
    ends: list[Action]
    earliest: int
    write_back: int


class _Overlap:
    """One plan, moment by moment."""

    def __init__(self, plan: Plan, trace: Trace, ahead: int) -> None:
        self._plan = plan
        self._trace = trace
        self._ahead = ahead
        self._compute, self._slots = plan.start.compute, plan.start.slots
        self._below = self._compute.below

        self._moved: dict[int, _Moved] = defaultdict(_Moved)
        self._free = FreeSlots(self._free_slots())
        self._pins = self._all_pins()
        # What leaves at a moment, and when it has left.
        self._dropped: dict[int, dict[PlaneRef, int]] = defaultdict(dict)
        self._written: dict[PlaneRef, int] = {}
        self._since: dict[PlaneRef, int] = {}  # the moment from which a unit's contents are below, and it is not here
        self._landed: dict[PlaneRef, int] = {}  # the moment before which a unit's last transfer has been waited for
        self._last_issue = 0

    def plan(self, goes_down: Collection[PlaneRef]) -> Plan:
        by_unit = [_by_unit(actions) for actions in self._plan.moments]
        for index, units in enumerate(by_unit):
            self._drop_unused(index, units)
        kept = []
        for index, moment in enumerate(self._trace.moments):
            kept.append(self._move(index, by_unit[index]) if by_unit[index] else [])
            for ref, writes, tier in moment.touches:
                if writes:
                    self._written[ref] = index
                if tier not in (None, self._compute):
                    self._since[ref] = index + 1
        moments = [self._together(index, own) for index, own in enumerate(kept)]
        self._wait_for_updates_late(moments)
        end = self._descend(moments, goes_down) if goes_down else self._plan.end
        return replace(self._plan, moments=tuple(map(tuple, moments)), end=end)

    def _descend(self, moments: list[list[Action]], goes_down: Collection[PlaneRef]) -> Snapshot:
        """Has these units begin to go down once they have been written for the last time; where everything is at the end."""
        state = Residency.of(self._plan.end)
        for ref in sorted(goes_down, key=lambda ref: (self._written.get(ref, -1), ref)):
            if state.is_dirty(ref, self._compute) and not state.flight(ref) and state.home[ref] is self._below:
                at = self._not_pinned(ref, max(len(moments) - self._ahead, self._written.get(ref, -1) + 1, 0))
                if at < len(moments):
                    down = Issue.copy(ref, self._compute, self._below, self._slots[ref])
                    moments[at].append(down)
                    apply(state, down)
        return state.snapshot()

    def _all_pins(self) -> dict[PlaneRef, list[int]]:
        """The moments at which each unit is used."""
        pins: dict[PlaneRef, list[int]] = defaultdict(list)
        freed_after = self._plan.freed_after()
        for index, moment in enumerate(self._trace.moments):
            used = (*moment.held, *(touch.ref for touch in moment.touches), *freed_after.get(index, ()))
            for ref in dict.fromkeys(used):
                pins[ref].append(index)
        return pins

    def _free_slots(self) -> list[int]:
        """Slots of the tier that computes that each moment leaves free, with what comes before it, as the plan is."""
        plan, used, free = self._plan, self._plan.start.slots_used, []
        budget = plan.machine.budget[self._compute]
        for moment, actions in zip(self._trace.moments, plan.moments, strict=True):
            peak = 0  # something may come before something else has left
            for action in actions:
                taken = slots_taken(action, self._compute)
                used += taken
                if taken > 0 and used > peak:
                    peak = used
            free.append((budget - moment.nonmodel_bytes) // plan.start.slot_bytes - max(peak, used))
        return free

    def _move(self, index: int, by_unit: dict[PlaneRef, list[Action]]) -> list[Action]:
        """Moves what can be moved from a moment to earlier ones; what stays."""
        coming, going, leaving = self._transfers(index, by_unit)
        for one in leaving:
            self._free.add(one.copy.slots, one.earliest, index)  # if they are needed
        early = [(at, copy) for copy in coming if (at := self._arrive(copy.of, index)) < index]
        self._since.update(dict.fromkeys(by_unit, index))
        gone = self._drop_early(leaving, min((at for at, _ in early), default=index), index)
        for ref, at in self._dropped[index].items():
            gone += by_unit[ref]
            self._since[ref] = at
        for at, copy in early:
            gone.append(copy)
            self._moved[at].copies.append(copy)
        for copy in going:
            at = self._goes_down(copy.of, index)
            if at < index:
                gone.append(copy)
                self._moved[at].write_backs.append(copy)
        moved = set(map(id, gone))
        return [action for action in self._plan.moments[index] if id(action) not in moved]

    def _transfers(
        self, index: int, by_unit: dict[PlaneRef, list[Action]]
    ) -> tuple[list[Issue], list[Issue], list[_Leaving]]:
        """The transfers of a moment from the tier below, those to it, and those of what leaves: of units with which nothing else is done then."""
        coming, going, leaving = list[Issue](), list[Issue](), list[_Leaving]()
        for ref, own in by_unit.items():
            copy, last = own[0], own[-1]
            if isinstance(last, Issue):  # a creation: it alone is not waited for
                self._written[ref] = index
            elif is_copy(copy) and own[1] == Wait(copy.work):
                if copy.work.tier is self._compute and len(own) == 2:
                    coming.append(copy)
                elif copy.src is self._compute and self._plan.start.home[ref] is self._below:
                    if len(own) == 2:
                        going.append(copy)
                    elif (found := self._leaving(copy, own[1:], index)) is not None:
                        leaving.append(found)
        return coming, going, leaving

    def _leaving(self, copy: Issue, ends: list[Action], index: int) -> _Leaving | None:
        """A unit that is written back directly to the tier below at a moment, and dropped; None where it can go no earlier."""
        begins = self._not_pinned(copy.of, max(index - self._ahead, self._written.get(copy.of, -1) + 1, 0))
        if begins >= index:
            return None
        return _Leaving(copy, ends, max(self._unused_from(copy.of, index), (begins + index + 1) // 2), begins)

    def _unused_from(self, ref: PlaneRef, index: int) -> int:
        """The moment from which on nobody uses a unit until this one, as early as something may be."""
        pins = self._pins[ref]
        before = bisect_left(pins, index)
        return max(index - self._ahead, pins[before - 1] + 1 if before else 0, 0)

    def _drop_unused(self, index: int, by_unit: dict[PlaneRef, list[Action]]) -> None:
        """Has what leaves at a moment without a transfer leave when it has been used for the last time."""
        for ref, own in by_unit.items():
            drop = own[0]
            if len(own) == 1 and isinstance(drop, Drop) and drop.tier is self._compute:
                # What was on its way as the plan began may land where nobody uses it.
                at = max(self._unused_from(ref, index), self._landed.get(ref, 0))
                if at < index:
                    self._free.add(drop.slots, at, index)
                    self._moved[at].drops.append(drop)
                    self._dropped[index][ref] = at
            elif ref in self._plan.start.in_flight:
                self._landed[ref] = index + 1

    def _goes_down(self, ref: PlaneRef, index: int) -> int:
        """The moment at which a unit that is used below, and stays, can begin to go there; the same moment where it cannot earlier."""
        if ref in self._plan.start.in_flight:
            return index
        return min(self._not_pinned(ref, max(index - self._ahead, self._written.get(ref, -1) + 1, 0)), index)

    def _not_pinned(self, ref: PlaneRef, first: int) -> int:
        """The first moment, from this on, at which nobody has a unit's address."""
        pins = self._pins[ref]
        at = bisect_left(pins, first)
        while at < len(pins) and pins[at] == first:
            first, at = first + 1, bisect_right(pins, first)
        return first

    def _arrive(self, ref: PlaneRef, index: int) -> int:
        """The first moment from which on a unit that comes has its slots free until this one; they are taken then."""
        at = index
        if ref not in self._plan.start.in_flight:
            first = max(index - self._ahead, self._last_issue, self._since.get(ref, 0))
            at = self._free.enough_from(self._slots[ref], min(first, index), index)
            self._free.add(-self._slots[ref], at, index)
        self._last_issue = max(self._last_issue, at)
        return at

    def _drop_early(self, leaving: Iterable[_Leaving], first: int, index: int) -> list[Action]:
        """Notes what is written back early, and what leaves early, from when on something needs its slots; the actions that are moved."""
        gone = list[Action]()
        for one in leaving:
            copy, ends = one.copy, one.ends
            self._moved[one.write_back].write_backs.append(copy)
            gone.append(copy)
            at = max(one.earliest, first)
            self._free.add(-copy.slots, one.earliest, at)
            if at < index:
                self._moved[at].drops += ends
                gone += ends
            self._since[copy.of] = at
        return gone

    def _together(self, index: int, kept: list[Action]) -> list[Action]:
        """The actions of a moment: what stays there, and what has come."""
        moved = self._moved.get(index)
        if moved is None:
            return kept
        arrivals = (WorkKind.COPY, self._compute)
        waits = (
            number
            for number, action in enumerate(kept)
            if isinstance(action, Wait) and (action.work.kind, action.work.tier) == arrivals
        )
        at = next(waits, len(kept))
        if any(isinstance(action, Drop) or is_copy(action) for action in kept[at:]):
            at = len(kept)  # nothing is taken before the last drop
        return [*moved.drops, *kept[:at], *moved.copies, *moved.write_backs, *kept[at:]]

    def _wait_for_updates_late(self, moments: list[list[Action]]) -> None:
        """Has each update, and its gradient on the way to it, waited for only before the first thing that needs its units, or the last moment."""
        later = _Later()
        for index in reversed(range(len(moments))):
            moment, actions = self._trace.moments[index], moments[index]
            wait = actions[-1] if actions else None
            if isinstance(wait, Wait) and wait.work.kind is WorkKind.UPDATE:
                tier = wait.work.tier
                last = min(index + self._ahead, len(moments) - 1)
                at = min(last, *(later.needs(touch.ref, tier, last) for touch in moment.touches))
                gradient = PlaneRef(wait.of.chunk, GRAD)
                drop_at = min(at, later.drops.get(gradient, at))
                # Where it is updated, slots that stay would be memory that a step needs without need.
                at = drop_at if tier is self._compute else self._drop_late(gradient, drop_at, at, moments)
                if index < at:
                    moments[at].insert(0, actions.pop())
                    own = [other for other in actions if other.of == gradient]
                    if own[-1:] == [Wait.copy(gradient, tier)]:
                        actions.remove(own[-1])
            later.note(index, moment, actions, self._compute)

    def _drop_late(self, ref: PlaneRef, index: int, at: int, moments: list[list[Action]]) -> int:
        """Has a unit's slots given back at a later moment than this one, if there are enough without them; when they are, if that is not later."""
        slots = self._slots.get(ref, 0)
        if at == index or self._free.enough_from(slots, index, at) > index:
            return index
        self._free.add(-slots, index, at)
        drop = Drop(ref, self._compute, slots)
        moments[index].remove(drop)
        moments[at].insert(0, drop)
        return at


class _Later:
    """Uses of units at the moments after one, as far as updates have to be over for them.

    Attributes:
        drops: the next moment that gives slots of a gradient back on the tier that computes.
    """

    def __init__(self) -> None:
        self.drops: dict[PlaneRef, int] = {}
        self._needed: dict[PlaneRef, int] = {}
        self._taken: dict[tuple[PlaneRef, Tier], int] = {}

    def note(self, index: int, moment: Moment, actions: Iterable[Action], compute: Tier) -> None:
        """Notes a moment, the one before those that have been noted."""
        for action in actions:
            if isinstance(action, Wait):
                self._needed[action.of] = index
            elif isinstance(action, Drop):
                if action.of.plane == GRAD and action.tier is compute:
                    self.drops[action.of] = index
                else:
                    self._taken[action.of, action.tier] = index
        for touch in moment.touches:
            if moment.updates is not None and touch.ref.plane == WEIGHT:
                # Updates of a run's weight on one tier do not wait for each other.
                for tier in _TIERS:
                    if tier is not (touch.tier or compute):
                        self._taken[touch.ref, tier] = index
            else:
                self._needed[touch.ref] = index
        self._needed.update((ref, index) for ref in moment.held)

    def needs(self, ref: PlaneRef, tier: Tier, last: int) -> int:
        """The first moment that needs an update of a unit on a tier to be over, or this one."""
        at = min(self._needed.get(ref, last), self._taken.get((ref, tier), last))
        if ref.plane == GRAD:  # it may be on its way, and its slots at either end be taken
            at = min(at, *(self._taken.get((ref, other), last) for other in _TIERS))
        return at


def _by_unit(actions: Iterable[Action]) -> dict[PlaneRef, list[Action]]:
    found: dict[PlaneRef, list[Action]] = {}
    for action in actions:
        found.setdefault(action.of, []).append(action)
    return found
