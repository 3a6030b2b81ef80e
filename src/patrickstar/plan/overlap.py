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

That is between the tier that computes and the one below it. Below a device the first three are then done between host and disk as well: what rests on
the disk comes to the host before it is needed, and what leaves the host does so halfway, whether something needs the slots or not. Who only reads
what the device has needs nothing of the host. The way between host and device stays as it is: it takes the shorter time of the two.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Container, Iterable
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from patrickstar.core.machine import Tier
from patrickstar.core.planes import GRAD, WEIGHT, PlaneRef
from patrickstar.core.trace import Moment, Trace
from patrickstar.plan.actions import Action, Drop, Issue, Wait, WorkKind, is_copy, slots_taken, units_of
from patrickstar.plan.plan import Plan, Snapshot, frees_by_moment
from patrickstar.plan.residency import Residency, apply

_TIERS = tuple(Tier)
_DROPS, _COPIES, _WRITE_BACKS = range(3)
"""The parts of what has come to a moment, in order."""
_BLOCK = 48  # moments: near the root of the few thousand that traces have


def overlap(plan: Plan, trace: Trace, *, moments_ahead: int | None, goes_down: Collection[PlaneRef] = ()) -> Plan:
    """The plan with its transfers at most so many moments earlier; None: as early as they can be.

    Args:
        goes_down: what will be used on the tier below after the plan's end, and not before that on any other.
    """
    issued = (action.work.kind for action in plan.actions() if isinstance(action, Issue))
    if moments_ahead == 0 or not (goes_down or any(kind is not WorkKind.CREATE for kind in issued)):
        return plan
    return _Overlap(plan, trace, moments_ahead, plan.start.compute).plan(goes_down)


def overlap_disk(plan: Plan, trace: Trace, *, moments_ahead: int | None) -> Plan:
    """The plan with its transfers between host and disk below a device at most so many moments earlier; None: as early as they can be."""
    if moments_ahead == 0 or plan.start.compute is Tier.HOST or Tier.DISK not in plan.start.home.values():
        return plan
    return _Overlap(plan, trace, moments_ahead, Tier.HOST).plan()


class _Leaving(NamedTuple):
    """A dirty unit that leaves the tier that computes: its write-back, what ends that, from when it may leave, and when the write-back can begin."""

    copy: Issue
    ends: list[Action]
    earliest: int
    write_back: int


class _Overlap:
    """One plan, moment by moment: its transfers between a tier and the one below it."""

    def __init__(self, plan: Plan, trace: Trace, ahead: int | None, upper: Tier) -> None:
        self._plan = plan
        self._trace = trace
        self._ahead = len(trace) if ahead is None else ahead
        self._upper, self._below = upper, upper.below
        self._is_between = upper is not plan.start.compute  # the host, between a device and the disk
        self._home, self._slots = plan.start.home, plan.start.slots

        # Actions that have come to a moment from later ones, by part, and those that are no longer at their own, by `id()`.
        self._moved: dict[int, list[list[Action]]] = {}
        self._gone: set[int] = set()
        self._level: list[int] = []  # slots in use as each moment begins, as the plan is
        self._capacity: list[int] = []  # slots that there are at each
        self._free = FreeSlots(self._free_slots())
        self._pins = self._all_pins()
        self._written: dict[PlaneRef, int] = {}
        self._last_issue = 0

    def plan(self, goes_down: Collection[PlaneRef] = ()) -> Plan:
        by_unit = [self._by_unit(actions) for actions in self._plan.moments]
        for index, units in enumerate(by_unit):
            self._drop_unused(index, units)
        kept = []
        for index, moment in enumerate(self._trace.moments):
            kept.append(self._move(index, by_unit[index]))
            self._written.update((touch.ref, index) for touch in moment.touches if touch.writes)
        moments = [self._together(index, own) for index, own in enumerate(kept)]
        if not self._is_between:
            self._wait_for_updates_late(moments)
        end = self._descend(moments, goes_down) if goes_down else self._plan.end
        return replace(self._plan, moments=tuple(map(tuple, moments)), end=end)

    def _put(self, at: int, part: int, *actions: Action) -> None:
        """Has actions done before an earlier moment than the one that has them."""
        self._moved.setdefault(at, [[], [], []])[part] += actions
        self._gone.update(map(id, actions))

    def _by_unit(self, actions: Iterable[Action]) -> dict[PlaneRef, list[Action]]:
        found: dict[PlaneRef, list[Action]] = {}
        for action in actions:
            if not isinstance(action, Drop) or action.tier is self._upper:
                found.setdefault(action.of, []).append(action)
        for ref in _updated(actions, self._home) if self._is_between else ():  # it is not to be had before it
            found.pop(ref, None)
        return found

    def _descend(self, moments: list[list[Action]], goes_down: Collection[PlaneRef]) -> Snapshot:
        """Has these units begin to go down once they have been written for the last time; where everything is at the end."""
        state = Residency.of(self._plan.end)
        for ref in sorted(goes_down, key=lambda ref: (self._written.get(ref, -1), ref)):
            if state.is_dirty(ref, self._upper) and not state.flight(ref) and state.home[ref] is self._below:
                at = self._complete_from(ref, len(moments))
                if at < len(moments):
                    down = Issue.copy(ref, self._upper, self._below, self._slots[ref])
                    moments[at].append(down)
                    apply(state, down)
        return state.snapshot()

    def _all_pins(self) -> dict[PlaneRef, list[int]]:
        """The moments at which each unit is used on the tier, or something is done with it."""
        pins: dict[PlaneRef, list[int]] = defaultdict(list)
        freed_after = frees_by_moment(self._plan.frees)
        for index, moment in enumerate(self._trace.moments):
            actions = self._plan.moments[index]
            if self._is_between:
                used = [touch.ref for touch in moment.touches if touch.writes or touch.tier is self._upper]
                used += _updated(actions, self._home)
            else:
                used = [*moment.held, *(touch.ref for touch in moment.touches)]
            for ref in dict.fromkeys((*used, *freed_after.get(index, ()), *(action.of for action in actions))):
                pins[ref].append(index)
        return pins

    def _taken(self, action: Action) -> int:
        """Slots that an action takes of the tier: what is at home on the host takes none there."""
        return 0 if self._is_between and self._home.get(action.of) is self._upper else slots_taken(action, self._upper)

    def _free_slots(self) -> list[int]:
        """Slots of the tier that each moment leaves free, with what comes before it, as the plan is."""
        start, free = self._plan.start, []
        budget, used = self._plan.machine.budget[self._upper], sum(start.slots[ref] for ref in start.taken[self._upper])
        resting = sum(start.slots[ref] for ref, home in start.home.items() if self._is_between and home is self._upper)
        for moment, actions in zip(self._trace.moments, self._plan.moments, strict=True):
            self._level.append(used)
            peak = 0  # something may come before something else has left
            for action in actions:
                taken = self._taken(action)
                used += taken
                if taken > 0 and used > peak:
                    peak = used
            others = 0 if self._is_between else moment.nonmodel_bytes
            self._capacity.append((budget - others) // start.slot_bytes - resting)
            free.append(self._capacity[-1] - max(peak, used))
        return free

    def _move(self, index: int, by_unit: dict[PlaneRef, list[Action]]) -> list[Action]:
        """Moves what can be moved from a moment to earlier ones; what stays."""
        coming, going, leaving = self._transfers(index, by_unit)
        first = index
        for one in leaving:
            self._free.add(one.copy.slots, one.earliest, index)  # if they are needed
        if self._is_between:
            self._drop_early(leaving, 0, index)
        for copy in coming:
            at = self._arrive(copy, index)
            if at < index:
                self._put(at, _COPIES, copy)
                first = min(first, at)
        if not self._is_between:
            self._drop_early(leaving, first, index)
        for copy in going:
            at = self._complete_from(copy.of, index)
            if at < index:
                self._put(at, _WRITE_BACKS, copy)
        return [action for action in self._plan.moments[index] if id(action) not in self._gone]

    def _transfers(
        self, index: int, by_unit: dict[PlaneRef, list[Action]]
    ) -> tuple[list[Issue], list[Issue], list[_Leaving]]:
        """The transfers with which a moment begins for a unit: from the tier below; to it, if no more is done with the unit; those of what leaves."""
        coming, going, leaving = list[Issue](), list[Issue](), list[_Leaving]()
        for ref, own in by_unit.items():
            copy, last = own[0], own[-1]
            if isinstance(last, Issue):  # a creation: it alone is not waited for
                self._written[ref] = index
            elif is_copy(copy) and own[1] == Wait(copy.work):
                if copy.work.tier is self._upper and copy.src is self._below:
                    coming.append(copy)
                elif copy.work.tier is self._below and self._home[ref] is self._below:
                    if len(own) == 2 and ref not in self._plan.start.in_flight:
                        going.append(copy)
                    elif len(own) == 3 and (begins := self._complete_from(ref, index)) < index:
                        earliest = max(self._unused_from(ref, index), (begins + index + 1) // 2)
                        leaving.append(_Leaving(copy, own[1:], earliest, begins))
        return coming, going, leaving

    def _unused_from(self, ref: PlaneRef, index: int) -> int:
        """The moment from which on nobody uses a unit until this one, as early as something may be."""
        pins = self._pins[ref]
        before = bisect_left(pins, index)
        return max(index - self._ahead, pins[before - 1] + 1 if before else 0, 0)

    def _drop_unused(self, index: int, by_unit: dict[PlaneRef, list[Action]]) -> None:
        """Has what leaves at a moment without a transfer leave when it has been used for the last time."""
        for ref, own in by_unit.items():
            drop = own[0]
            if len(own) == 1 and isinstance(drop, Drop):
                at = self._unused_from(ref, index)
                if at < index:
                    self._free.add(drop.slots, at, index)
                    self._put(at, _DROPS, drop)

    def _complete_from(self, ref: PlaneRef, index: int) -> int:
        """The first moment at which a unit can begin to go down: it is not written until this one, and nobody has its address."""
        if self._is_between:
            return self._unused_from(ref, index)
        pins, first = self._pins[ref], max(index - self._ahead, self._written.get(ref, -1) + 1, 0)
        at = bisect_left(pins, first)
        while at < len(pins) and pins[at] == first:
            first, at = first + 1, bisect_right(pins, first)
        return first

    def _arrive(self, copy: Issue, index: int) -> int:
        """The first moment from which on a unit that comes has its slots free until this one; they are taken then."""
        if self._is_between and not self._fits(copy, index):
            return index
        first = max(self._last_issue, self._unused_from(copy.of, index))
        at = self._free.enough_from(copy.slots, min(first, index), index)
        self._free.add(-copy.slots, at, index)
        self._last_issue = max(self._last_issue, at)
        return at

    def _fits(self, copy: Issue, index: int) -> bool:
        """Tells whether there are slots for a copy before all that a moment has before it, but for actions that are gone."""
        actions, gone = self._plan.moments[index], self._gone
        level = peak = self._level[index] + sum(self._taken(action) for action in actions if id(action) in gone)
        for action in takewhile(lambda action: action is not copy, actions):
            level += 0 if id(action) in gone else self._taken(action)
            peak = max(peak, level)
        return peak + copy.slots <= self._capacity[index]

    def _drop_early(self, leaving: Iterable[_Leaving], first: int, index: int) -> None:
        """Has what leaves written back early, and leave early, from when on something needs its slots."""
        for one in leaving:
            self._put(one.write_back, _WRITE_BACKS, one.copy)
            at = max(one.earliest, first)
            self._free.add(-one.copy.slots, one.earliest, min(at, index))
            if at < index:
                self._put(at, _DROPS, *one.ends)

    def _together(self, index: int, kept: list[Action]) -> list[Action]:
        """The actions of a moment: what stays there, and what has come."""
        moved = self._moved.get(index)
        if moved is None:
            return kept
        arrivals = (WorkKind.COPY, self._upper)
        waits = (
            number
            for number, action in enumerate(kept)
            if isinstance(action, Wait) and (action.work.kind, action.work.tier) == arrivals
        )
        at = next(waits, len(kept))
        if any(isinstance(action, Drop) or is_copy(action) for action in kept[at:]):
            at = len(kept)  # nothing is taken before the last drop
        drops, copies, write_backs = moved
        return [*drops, *kept[:at], *copies, *write_backs, *kept[at:]]

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
                at = drop_at if tier is self._upper else self._drop_late(gradient, drop_at, at, moments)
                if index < at:
                    moments[at].insert(0, actions.pop())
                    own = [other for other in actions if other.of == gradient]
                    if own[-1:] == [Wait.copy(gradient, tier)]:
                        actions.remove(own[-1])
            later.note(index, moment, actions, self._upper)

    def _drop_late(self, ref: PlaneRef, index: int, at: int, moments: list[list[Action]]) -> int:
        """Has a unit's slots given back at a later moment than this one, if there are enough without them; when they are, if that is not later."""
        slots = self._slots.get(ref, 0)
        if at == index or self._free.enough_from(slots, index, at) > index:
            return index
        self._free.add(-slots, index, at)
        drop = Drop(ref, self._upper, slots)
        moments[index].remove(drop)
        moments[at].insert(0, drop)
        return at


class FreeSlots:
    """Numbers of free slots, moment by moment, counted from 0, that change over ranges of moments.

    Moments lie in blocks: what is added to a whole block is noted once, and a block with enough everywhere is passed over at once.
    """

    def __init__(self, free: Iterable[int]) -> None:
        self._free = list(free)
        self._added = [0] * (-(-len(self._free) // _BLOCK))
        # No moment of a block has less.
        self._least = [min(self._free[at : at + _BLOCK]) for at in range(0, len(self._free), _BLOCK)]

    def add(self, slots: int, first: int, end: int) -> None:
        """Adds so many slots to each moment from `first` to before `end`."""
        while first < end:
            block = first // _BLOCK
            start, stop = block * _BLOCK, min((block + 1) * _BLOCK, len(self._free))
            if first == start and end >= stop:
                self._added[block] += slots
                self._least[block] += slots
            else:
                for moment in range(first, min(end, stop)):
                    self._free[moment] += slots
                self._least[block] += min(slots, 0)
            first = stop

    def enough_from(self, slots: int, first: int, end: int) -> int:
        """The earliest moment, from `first` on, from which every moment before `end` has at least so many; `end` where the last has not."""
        while end > first:
            block = (end - 1) // _BLOCK
            start, added = block * _BLOCK, self._added[block]
            if self._least[block] < slots:
                for moment in range(end - 1, max(first, start) - 1, -1):
                    if self._free[moment] + added < slots:
                        return moment + 1
                self._least[block] = min(self._free[start : start + _BLOCK]) + added
            end = start
        return max(end, first)


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


def _updated(actions: Iterable[Action], home: Container[PlaneRef]) -> list[PlaneRef]:
    """Units that updates have used which are over with a moment: those may have begun long before it."""
    over = (action.work for action in actions if isinstance(action, Wait) and action.work.kind is WorkKind.UPDATE)
    return [ref for work in over for ref in units_of(Issue(work), home)]
