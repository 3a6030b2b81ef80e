"""Overlap between host and disk below a device: what rests on the disk comes to the host before it is needed, and goes back before room is.

As in `plan/overlap.py`, the same actions are done at other moments, and nothing else changes:

    early drop         what leaves the host without a transfer leaves when it has been used for the last time
    early write-back   what only the host has is copied to the disk after its last use, and leaves halfway to the use of its slots
    read ahead         a copy from the disk is issued at the earliest moment from which the host has slots for it until its use

    moment      3            5            7                  9
    before                                                   a H>K, a K?, a H!, b K>H, b H?, b H>D, b D?
    after       a H>K        a K?, a H!   b K>H              b H?, b H>D, b D?

Slots of the host in use never exceed what homes leave it. Way between host and device stays as it is: it takes the shorter time of the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Trace
from patrickstar.plan.actions import Action, Drop, Issue, Wait, Work, WorkKind, slots_taken
from patrickstar.plan.free_slots import FreeSlots
from patrickstar.plan.make_room import capacity_of
from patrickstar.plan.plan import Plan
from patrickstar.plan.residency import Residency
from patrickstar.plan.works import units_of


def overlap_disk(plan: Plan, trace: Trace, *, moments_ahead: int | None) -> Plan:
    """The plan with its transfers between host and disk at most so many moments earlier; None: as early as they can be."""
    is_below = plan.start.compute is Tier.DEVICE and Tier.DISK in plan.start.home.values()
    if moments_ahead == 0 or not is_below:
        return plan
    return _OverlapDisk(plan, trace, len(trace) if moments_ahead is None else moments_ahead).plan()


@dataclass(slots=True)
class _MovedHere:
    """Actions that have come to a moment from later ones: before its own, and after."""

    before: list[Action] = field(default_factory=list)
    after: list[Action] = field(default_factory=list)


class _OverlapDisk:
    """One plan, moment by moment."""

    def __init__(self, plan: Plan, trace: Trace, ahead: int) -> None:
        self._plan = plan
        self._trace = trace
        self._ahead = ahead
        self._state = Residency.of(plan.start)
        self._slots = plan.start.slots
        self._capacity = capacity_of(self._state, 0, host_bytes=plan.machine.budget[Tier.HOST])[Tier.HOST]
        self._used = [self._state.slots_used[Tier.HOST]]  # as each moment begins, as the plan is
        peaks = []
        for actions in plan.moments:
            *_, end = levels = self._levels(self._used[-1], actions)
            peaks.append(max(levels))
            self._used.append(end)
        self._free = FreeSlots(self._capacity - peak for peak in peaks)

        self._moved: dict[int, _MovedHere] = defaultdict(_MovedHere)
        self._touched: dict[PlaneRef, int] = {}  # the last moment that changes where a unit is, or uses it on the host
        self._last_read = 0

    def plan(self) -> Plan:
        freed_after = self._plan.freed_after()
        kept = []
        for index, actions in enumerate(self._plan.moments):
            kept.append(self._move(index, actions))
            # Who only reads what the device has needs nothing of the host.
            uses = (
                touch.ref for touch in self._trace.moments[index].touches if touch.writes or touch.tier is Tier.HOST
            )
            self._touched.update((ref, index) for ref in (*self._units(actions), *uses))
            self._touched.update((ref, index) for ref in freed_after.get(index, ()))
        moved = (self._moved[index] for index in range(len(kept)))
        moments = ((*one.before, *stays, *one.after) for one, stays in zip(moved, kept, strict=True))
        return replace(self._plan, moments=tuple(moments))

    def _move(self, index: int, actions: Sequence[Action]) -> list[Action]:
        """Moves what can be moved from a moment to earlier ones; what stays."""
        by_unit: dict[PlaneRef, list[Action]] = defaultdict(list)
        for action in actions:
            by_unit[action.of].append(action)
        # What an update is over with at this moment is not to be had before it.
        for ref in self._units(
            action for action in actions if isinstance(action, Wait) and action.work.kind is WorkKind.UPDATE
        ):
            by_unit.pop(ref, None)
        gone: set[Action] = set()
        level = self._used[index]
        for ref, own in by_unit.items():
            moved = self._leave(ref, own, index)
            gone.update(moved)
            level -= sum(action.slots for action in moved if isinstance(action, Drop))
        stays = [action for action in actions if action not in gone]
        for ref, own in by_unit.items():
            read = own[0]
            if not isinstance(read, Issue) or (read.src, read.work.tier) != (Tier.DISK, Tier.HOST):
                continue
            before = self._levels(level, stays[: stays.index(read)])
            if max(before) + read.slots > self._capacity:
                continue
            first = max(self._first(ref, index), self._last_read)
            at = self._free.enough_from(read.slots, min(first, index), index)
            if at < index:
                self._free.add(-read.slots, at, index)
                self._moved[at].after.append(read)
                self._last_read = at
                stays.remove(read)
                level += read.slots
        return stays

    def _leave(self, ref: PlaneRef, own: Sequence[Action], index: int) -> Sequence[Action]:
        """Has a unit that leaves the host at a moment leave before it, if that is all that is done with it there; what has been moved."""
        here = [action for action in own if not (isinstance(action, Drop) and action.tier is Tier.DEVICE)]
        match here:
            case [Drop(_, Tier.HOST, slots) as drop]:
                at = self._first(ref, index)
                if at == index:
                    return ()
                self._moved[at].before.append(drop)
                self._free.add(slots, at, index)
                return here
            case [Issue(Work(_, _, Tier.DISK), Tier.HOST) as copy, Wait() as wait, Drop(_, Tier.HOST, slots) as drop]:
                begins = self._first(ref, index)
                if begins == index:
                    return ()
                self._moved[begins].after.append(copy)
                ends = (begins + index + 1) // 2
                if ends == index:
                    return (copy,)
                self._moved[ends].before += [wait, drop]
                self._free.add(slots, ends, index)
                return here
        return ()

    def _first(self, ref: PlaneRef, index: int) -> int:
        """The earliest moment at which what is done with a unit at this one can be done."""
        return max(self._touched.get(ref, -1) + 1, index - self._ahead, 0)

    def _levels(self, level: int, actions: Iterable[Action]) -> list[int]:
        """Slots of the host in use before these actions, and after each."""
        found = [level]
        for action in actions:
            if action.of in self._slots and self._state.has_slots_to_take(action.of, Tier.HOST):
                level += slots_taken(action, Tier.HOST)
            found.append(level)
        return found

    def _units(self, actions: Iterable[Action]) -> Iterable[PlaneRef]:
        """The units that actions are about: of an update all that it uses."""
        for action in actions:
            yield from (action.of,) if isinstance(action, Drop) else units_of(Issue(action.work), self._state.home)
