"""Overlap: transfers of a plan that begin before they are needed, so that computing goes on meanwhile.

A plan as `make_plan` makes it issues each transfer at the moment that needs it, and waits for it there. Here the same actions are done at other
moments, and nothing else changes:

    hoist              a unit's copy to the tier that computes is issued at the earliest moment from which its slots are free until its use
    early write-back   what leaves dirty is copied home as soon as it has been written for the last time
    early drop         what leaves gives its slots back before that, where something that is fetched early takes them
    late wait          an update is waited for when something needs what it uses

    moment      3                  4          5          6                          7
    before                                               a D>H, a H?, a D!, b H>D, b D?
    after       a D>H                         a H?, a D!, b H>D     b D?

The wait for an arrival stays at its use, and that for a write-back comes halfway between its issue and the use of the slots: what leaves has as much
time as what comes. Copies into one tier are issued in the order in which they are needed. Slots in use never exceed what the moment leaves them.

Only transfers between the tier that computes and the one below it are moved; what goes on to the disk below a device is not.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Trace
from patrickstar.plan.actions import Action, Copy, Create, Drop, Move, Update, UpdateWait, Wait
from patrickstar.plan.free_slots import FreeSlots
from patrickstar.plan.plan import Plan

__all__ = ["overlap"]


def overlap(plan: Plan, trace: Trace, *, moments_ahead: int | None) -> Plan:
    """The plan with its transfers at most so many moments earlier; None: as early as they can be."""
    if moments_ahead == 0 or not any(isinstance(action, Copy | Update) for action in plan.actions()):
        return plan
    return _Overlap(plan, trace, len(trace) if moments_ahead is None else moments_ahead).plan()


@dataclass(slots=True)
class _Moved:
    """Actions that have come to a moment from later ones."""

    drops: list[Action] = field(default_factory=list)
    copies: list[Action] = field(default_factory=list)
    write_backs: list[Action] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A unit that leaves the tier that computes at a moment: from when it may, and the moment at which its write-back can begin, if it has one."""

    ref: PlaneRef
    earliest: int
    write_back: int | None


class _Overlap:
    """One plan, moment by moment."""

    def __init__(self, plan: Plan, trace: Trace, ahead: int) -> None:
        self._plan = plan
        self._trace = trace
        self._ahead = ahead
        self._compute, self._slots = plan.start.compute, plan.start.slots
        self._below = self._compute.below

        self._moved: dict[int, _Moved] = defaultdict(_Moved)
        self._kept: list[list[Action]] = []
        self._free = FreeSlots(self._free_slots())
        self._pins: dict[PlaneRef, list[int]] = defaultdict(list)
        self._written: dict[PlaneRef, int] = {}
        self._since: dict[PlaneRef, int] = {}  # the moment from which a unit's contents are below, and it is not here
        self._last_issue = 0

    def plan(self) -> Plan:
        freed_after = self._plan.freed_after()
        for index, moment in enumerate(self._trace.moments):
            self._kept.append(self._move(index, self._plan.moments[index]))
            for ref in moment.held:
                self._pins[ref].append(index)
            for touch in moment.touches:
                self._pins[touch.ref].append(index)
                if touch.writes:
                    self._written[touch.ref] = index
                if touch.tier not in (None, self._compute):
                    self._since[touch.ref] = index + 1
            for ref in freed_after.get(index, ()):
                self._pins[ref].append(index)
        moments = [self._together(index, kept) for index, kept in enumerate(self._kept)]
        self._wait_for_updates_late(moments)
        return replace(self._plan, moments=tuple(map(tuple, moments)))

    def _free_slots(self) -> list[int]:
        """Slots of the tier that computes that each moment leaves free, as the plan is."""
        plan, used, free = self._plan, self._plan.start.slots_used, []
        budget = plan.machine.budget[self._compute]
        for moment, actions in zip(self._trace.moments, plan.moments, strict=True):
            for action in actions:
                match action:
                    case Copy(_, _, tier, slots) | Create(_, tier, slots) if tier is self._compute:
                        used += slots
                    case Drop(_, tier, slots) if tier is self._compute:
                        used -= slots
            free.append((budget - moment.nonmodel_bytes) // plan.start.slot_bytes - used)
        return free

    def _move(self, index: int, actions: Sequence[Action]) -> list[Action]:
        """Moves what can be moved from a moment to earlier ones; what stays."""
        by_unit: dict[PlaneRef, list[Move]] = defaultdict(list)
        for action in actions:
            if not isinstance(action, Update | UpdateWait):
                by_unit[action.ref].append(action)
        leaving = [found for ref, own in by_unit.items() if (found := self._leaving(ref, own, index))]
        for one in leaving:
            self._free.add(self._slots[one.ref], one.earliest, index)  # if they are needed
        early: dict[PlaneRef, int] = {}
        for ref, own in by_unit.items():
            at = self._arrive(ref, index) if self._arrives(own) else index
            if at < index:
                early[ref] = at
        gone = self._drop_early(leaving, min(early.values(), default=index), index)
        for ref, own in by_unit.items():
            at = self._goes_down(ref, own, index)
            if at < index:
                early[ref] = at
                self._moved[at].write_backs += [action for action in own if isinstance(action, Copy)]
        for ref, at in early.items():
            if self._arrives(by_unit[ref]):
                self._moved[at].copies += [action for action in by_unit[ref] if isinstance(action, Copy)]
        self._note_places(actions, gone, index)
        return [
            action
            for action in actions
            if isinstance(action, Update | UpdateWait)
            or not ((action.ref in early and isinstance(action, Copy)) or action in gone.get(action.ref, ()))
        ]

    def _leaving(self, ref: PlaneRef, own: Sequence[Move], index: int) -> _Leaving | None:
        """A unit whose actions at a moment make it leave, directly to the tier below; None where they do not, or it can leave no earlier."""
        match own:
            case [Drop(_, self._compute, _)]:
                write_back = False
            case [Copy(_, self._compute, self._below, _), Wait(), Drop(_, self._compute, _)]:
                write_back = self._plan.start.home[ref] is self._below
                if not write_back:
                    return None
            case _:
                return None
        pins = self._pins[ref]
        first = max(index - self._ahead, 0)
        used_until = max(first, pins[-1] + 1 if pins else 0)
        if not write_back:
            return _Leaving(ref, used_until, None) if used_until < index else None
        begins = self._not_pinned(ref, max(first, self._written.get(ref, -1) + 1))
        if begins >= index:
            return None
        return _Leaving(ref, max(used_until, (begins + index + 1) // 2), begins)

    def _goes_down(self, ref: PlaneRef, own: Sequence[Move], index: int) -> int:
        """The moment at which a unit that is used below, and stays, can begin to go there; the same moment where it does not, or not earlier."""
        match own:
            case [Copy(_, self._compute, self._below, _), Wait(_, self._below)] if (
                self._plan.start.home[ref] is self._below and ref not in self._plan.start.in_flight
            ):
                return min(self._not_pinned(ref, max(index - self._ahead, self._written.get(ref, -1) + 1, 0)), index)
        return index

    def _not_pinned(self, ref: PlaneRef, first: int) -> int:
        """The first moment, from this on, at which nobody has a unit's address."""
        pins = self._pins[ref]
        at = bisect_left(pins, first)
        while at < len(pins) and pins[at] == first:
            first, at = first + 1, bisect_right(pins, first)
        return first

    def _arrives(self, own: Sequence[Move]) -> bool:
        """Tells whether a unit's actions at a moment are its way from the tier below to the one that computes, and no more."""
        match own:
            case [Copy(_, self._below, self._compute, _), Wait(_, self._compute)]:
                return True
        return False

    def _arrive(self, ref: PlaneRef, index: int) -> int:
        """The first moment from which on the unit's slots are free until this one, which they are no longer then."""
        at = index
        if ref not in self._plan.start.in_flight:
            first = max(index - self._ahead, self._last_issue, self._since.get(ref, 0))
            at = self._free.enough_from(self._slots[ref], min(first, index), index)
            self._free.add(-self._slots[ref], at, index)
        self._last_issue = max(self._last_issue, at)
        return at

    def _drop_early(self, leaving: Iterable[_Leaving], first: int, index: int) -> dict[PlaneRef, list[Action]]:
        """Notes what is written back early, and what leaves early, from when on something needs its slots; the actions of each that are moved."""
        gone: dict[PlaneRef, list[Action]] = {}
        for one in leaving:
            ref, slots, moved = one.ref, self._slots[one.ref], list[Action]()
            if one.write_back is not None:
                moved.append(Copy(ref, self._compute, self._below, slots))
                self._moved[one.write_back].write_backs.append(moved[0])
            at = max(one.earliest, first)
            self._free.add(-slots, one.earliest, at)
            if at < index:
                ends: list[Action] = [Drop(ref, self._compute, slots)]
                if one.write_back is not None:
                    ends.insert(0, Wait(ref, self._below))
                self._moved[at].drops += ends
                moved += ends
            gone[ref] = moved
            self._since[ref] = at
        return gone

    def _note_places(self, actions: Iterable[Action], gone: Collection[PlaneRef], index: int) -> None:
        """Notes what comes and goes at a moment, but for what has left before."""
        for action in actions:
            match action:
                case Drop(ref, self._compute, _) | Wait(ref, self._below) if ref not in gone:
                    self._since[ref] = index
                case Create(ref, self._compute, _):
                    self._written[ref] = index
                    self._pins[ref].append(index)

    def _together(self, index: int, kept: list[Action]) -> list[Action]:
        """The actions of a moment: what stays there, and what has come."""
        moved = self._moved.get(index)
        if moved is None:
            return kept
        waits = (
            number for number, action in enumerate(kept) if isinstance(action, Wait) and action.tier is self._compute
        )
        at = next(waits, len(kept))
        if any(isinstance(action, Drop | Copy) for action in kept[at:]):
            at = len(kept)  # nothing is taken before the last drop
        return [*moved.drops, *kept[:at], *moved.copies, *moved.write_backs, *kept[at:]]

    def _wait_for_updates_late(self, moments: list[list[Action]]) -> None:
        """Has each update waited for only before the first thing that needs its units, or before the last moment."""
        needed: dict[PlaneRef, int] = {}
        taken: dict[tuple[PlaneRef, Tier], int] = {}
        for index in reversed(range(len(moments))):
            moment, actions = self._trace.moments[index], moments[index]
            wait = actions[-1] if actions else None
            if isinstance(wait, UpdateWait):
                last = min(index + self._ahead, len(moments) - 1)
                units = [touch.ref for touch in moment.touches]
                at = min(
                    *(needed.get(ref, last) for ref in units),
                    *(taken.get((ref, wait.tier), last) for ref in units),
                    last,
                )
                if index < at:
                    moments[at].insert(0, actions.pop())
            for action in actions:
                match action:
                    case Wait(ref, _):
                        needed[ref] = index
                    case Drop(ref, tier, _) | Create(ref, tier, _) | Copy(ref, _, tier, _):
                        taken[ref, tier] = index
            needed.update((touch.ref, index) for touch in moment.touches)
            needed.update((ref, index) for ref in moment.held)
