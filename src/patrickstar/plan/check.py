"""Invariants of every plan. `check()` returns violations; it never repairs.

(1) A unit that a moment touches or holds is on the tier where that happens, arrived, with its last contents.
    Otherwise an operation reads bytes still in flight, or older than what was written.
(2) Slots in use plus non-model bytes never exceed a tier's budget, and no slot is given back twice.
    A budget is a promise about what the process holds.
(3) A pinned unit is neither moved nor dropped, nor written elsewhere.
    Somebody has its address: an operation, or a tensor that autograd saved.
(4) The last valid copy of a unit is never dropped, nor is a stale one copied in its place.
    A clean copy may go without a transfer only because another tier holds the same bytes.
(5) Each issue has exactly one wait, before first use and before its slots are used for anything else.
    A transfer that nobody waits for may read or write its slots at any later time. One that outlasts the plan is
    written down at its end, and the next one's to wait for.
(6) All ranks of a group issue the same collectives in the same order.
    Otherwise they wait for each other for ever. One rank has none: any work that is not of the three local kinds is a
    violation.
(7) What leaves a tier is the local shard, never the gathered chunk.
    One rank's shard is the whole unit: a copy carries exactly its slots, as do the slots it takes and gives back.
(8) Each gradient is reduced once per step boundary.
    One rank has nothing to reduce, but the same mistake to make: a gradient that has contents is not begun again
    from zeros, or what was accumulated is lost.
(9) Homes are unchanged, no contents are lost, and the end that is written down is where the actions lead.
    Otherwise the next plan starts from a state that is not there.
(10) An update begins once, where its moment has what it needs, and has exactly one wait: before anything else uses its units there, takes
    their slots, or counts on a transfer of them. Its gradient may be on its way there: the update's wait is then the transfer's as well. Other
    updates on its tier may use the weight of a run meanwhile: each has a part of it for itself.
    Otherwise somebody computes with a weight of which a part is new.

Nothing here is shared with `residency.apply`. A plan is read unit by unit, each from its first moment to its last: bytes
are told apart by who wrote them when, a transfer carries what its source had at its issue, and only afterwards is it
added up what all units take together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from patrickstar.core.layout import Layout
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import GRAD, WEIGHT, PlaneRef
from patrickstar.core.trace import Moment, Touch, Trace
from patrickstar.plan.actions import Action, Drop, Issue, Wait, Work, WorkKind
from patrickstar.plan.plan import Plan, Snapshot, frees_by_moment

_At = tuple[int, int]
"""A place in a plan: the number of a moment, and of an action before it, or one of these two."""

_Found = list[tuple[_At, int, str]]
"""Violations: the place of each, the invariant that it breaks, and what is wrong."""

_USE, _FREE = 1 << 30, (1 << 30) + 1
_PLAN, _START = (-2, 0), (-1, 0)


def check(plan: Plan, trace: Trace, layout: Layout, machine: Machine) -> list[str]:
    """Violations, in the order of the plan, as `(4) moment 17 backward h.3.mlp.w1: c3.weight D!: ...`."""
    found, start, end = _Found(), plan.start, plan.end
    if plan.layout != layout.digest():
        found.append((_PLAN, 9, f"it is for layout {plan.layout}, not {layout.digest()}"))
    if len(plan.moments) != len(trace):
        found.append((_PLAN, 9, f"it has {len(plan.moments)} moments, the trace {len(trace)}"))
    histories = {ref: _History(ref, start, found) for ref in sorted(start.home)}
    _tell(histories, plan, trace, found)
    at_end = (len(trace), 0)
    if (end.compute, end.slot_bytes, end.home, end.slots) != (start.compute, start.slot_bytes, start.home, start.slots):
        found.append((at_end, 9, "homes or sizes of units are not those of the start"))
    else:
        freed = {ref for _, ref in plan.frees}
        for ref, history in histories.items():
            history.end(at_end, end, may_be_lost=ref in freed or ref not in start.newest)
    _add_up(histories.values(), start, trace, machine, found)
    places = {_PLAN[0]: "the plan", _START[0]: "the start", len(trace): "the end"}
    in_order = sorted(found, key=lambda one: one[0])
    return [f"({no}) {places.get(at) or f'moment {trace.name(at)}'}: {text}" for (at, _), no, text in in_order]


def _tell(histories: dict[PlaneRef, _History], plan: Plan, trace: Trace, found: _Found) -> None:
    compute, freed_after = plan.start.compute, frees_by_moment(plan.frees)
    updates = _Updates(histories, compute, found)
    for index, (moment, actions) in enumerate(zip(trace.moments, plan.moments, strict=False)):
        pinned = {*moment.held, *(touch.ref for touch in moment.touches if touch.tier in (None, compute))}
        for number, action in enumerate(actions):
            if not isinstance(action, Issue | Wait | Drop):
                found.append(((index, number), 6, f"{action}: not an action of one rank"))
            elif not isinstance(action, Drop) and action.work.kind is WorkKind.UPDATE:
                updates.act((index, number), action, moment)
            elif action.of not in histories:
                found.append(((index, number), 9, f"{action}: there is no such unit"))
            else:
                histories[action.of].act((index, number), action, is_pinned=action.of in pinned)
        if moment.updates is not None and moment.updates not in updates.begun:
            found.append(((index, _USE), 10, f"the update of c{moment.updates} does not begin"))
        _use(histories, moment, (index, _USE), pinned, compute)
        for ref in freed_after.get(index, ()):
            histories[ref].free((index, _FREE))
    for update in sorted(updates.under_way, key=lambda update: update.of):
        found.append(((len(trace), 0), 10, f"the update of c{update.of.chunk} was never waited for"))


def _use(histories: dict[PlaneRef, _History], moment: Moment, at: _At, pinned: set[PlaneRef], compute: Tier) -> None:
    for ref in sorted(pinned):
        histories[ref].use(at, compute, by=moment.updates)
    for touch in moment.touches:
        history, tier = histories[touch.ref], touch.tier or compute
        if tier is not compute:
            history.use(at, tier, by=moment.updates)
            if touch.writes and touch.ref in pinned:
                there, here = tier.label, compute.label
                history.wrong(at, 3, f"{touch.ref} is written on the {there} while it is in use on the {here}")
        if touch.writes:
            history.write(at, tier)


@dataclass(slots=True)
class _Updates:
    """The updates of chunks: each begins at its moment, and is waited for once."""

    _histories: dict[PlaneRef, _History]
    _compute: Tier
    _found: _Found
    under_way: dict[Work, tuple[Touch, ...]] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)

    def act(self, at: _At, action: Issue | Wait, moment: Moment) -> None:
        update, chunk = action.work, action.of.chunk
        if isinstance(action, Wait):
            if update not in self.under_way:
                self._found.append((at, 10, f"{action}: no such update has begun"))
            for touch in self.under_way.pop(update, ()):
                self._histories[touch.ref].end_update(at, update)
            return
        if chunk in self.begun:
            self._found.append((at, 10, f"{update}: it has been done"))
        if moment.updates != chunk or (moment.update_tier or self._compute) is not update.tier:
            self._found.append((at, 10, f"{update}: this is not its moment"))
            return
        self.begun.add(chunk)
        self.under_way[update] = moment.touches
        for touch in moment.touches:
            self._histories[touch.ref].begin_update(at, update)


class _History:
    """One unit, from the start to the end: who wrote the bytes on each tier, and where it takes room.

    `changes`: by place, the tier where room is taken or given back, and how many slots of it.
    """

    def __init__(self, ref: PlaneRef, start: Snapshot, found: _Found) -> None:
        self._ref = ref
        self._found = found
        self._home = start.home[ref]
        self._slots = start.slots[ref]
        self._compute = start.compute
        tiers = list(Tier)
        # From where it is used to where it rests.
        self._way = tiers[tiers.index(self._compute) : tiers.index(self._home) + 1]
        self._writer = "before" if ref in start.newest else None
        self._bytes: dict[Tier, str | None] = dict.fromkeys(start.newest.get(ref, ()), self._writer)
        self._room = {tier for tier, refs in start.taken.items() if ref in refs}
        self._under_way: dict[Tier, tuple[Tier, str | None]] = {}
        self._updates: list[Work] = []
        self._is_unwanted = False
        if ref in start.in_flight:
            src, dst = start.in_flight[ref]
            self._under_way[dst] = src, self._bytes.get(src)

        self.changes = [(_START, tier, self._slots) for tier in self._room]
        if self._home is not self._compute:
            self.changes.append((_START, self._home, self._slots))

    def wrong(self, at: _At, number: int, text: str) -> None:
        self._found.append((at, number, text))

    def _is_last(self, tier: Tier) -> bool:
        return self._writer is not None and self._bytes.get(tier) == self._writer

    def _needs_room(self, tier: Tier) -> bool:
        return tier is self._compute or tier is not self._home

    def begin_update(self, at: _At, update: Work) -> None:
        for other in self._updates:
            if not self._is_shared_with(other, update.tier):
                self.wrong(at, 10, f"{update}: {self._ref} is used by {other}, which has not been waited for")
        self._updates.append(update)

    def _is_shared_with(self, other: Work, tier: Tier) -> bool:
        return self._ref.plane == WEIGHT and other.tier is tier

    def end_update(self, at: _At, update: Work) -> None:
        self._updates.remove(update)
        if self._ref.plane == GRAD and update.tier in self._under_way:
            _, self._bytes[update.tier] = self._under_way.pop(update.tier)
        if self._is_unwanted and not self._updates:
            self.free(at)

    def act(self, at: _At, action: Action, *, is_pinned: bool) -> None:
        tier = action.tier if isinstance(action, Drop) else action.work.tier
        for update in self._updates:
            # A gradient may arrive before its update is over; what an update writes comes after it.
            reads_it = isinstance(action, Wait) and self._ref.plane != GRAD
            if reads_it or (not isinstance(action, Wait) and tier is update.tier):
                self.wrong(at, 10, f"{action}: {update} has not been waited for")
        if not isinstance(action, Wait) and action.slots != self._slots:
            self.wrong(at, 7, f"{action}: the unit takes {self._slots} slots")
        match action:
            case Issue(_, Tier() as src):
                self._copy(at, action, src, tier, is_pinned=is_pinned)
            case Issue():
                self._create(at, action, tier)
            case Drop():
                self._drop(at, action, tier, is_pinned=is_pinned)
            case Wait() if tier in self._under_way:
                _, self._bytes[tier] = self._under_way.pop(tier)
            case Wait():
                self.wrong(at, 5, f"{action}: no such transfer has been issued")

    def _copy(self, at: _At, action: Issue, src: Tier, dst: Tier, *, is_pinned: bool) -> None:
        if src is self._compute and is_pinned:
            self.wrong(at, 3, f"{action}: it is in use at this moment")
        way = self._way
        if src not in way or dst not in way or abs(way.index(src) - way.index(dst)) != 1:
            self.wrong(at, 9, f"{action}: it rests on the {self._home.label}, and this is not its way there or back")
        if src in self._under_way:
            self.wrong(at, 5, f"{action}: the transfer to the {src.label} has not been waited for")
        elif not self._is_last(src):
            self.wrong(at, 4, f"{action}: the {src.label} does not hold its last contents")
        if dst in self._under_way:
            self.wrong(at, 5, f"{action}: issued again before its wait")
        if self._needs_room(dst):
            self._take(at, action, dst)
        self._under_way[dst] = src, self._bytes.get(src)
        self._bytes.pop(dst, None)

    def _drop(self, at: _At, action: Drop, tier: Tier, *, is_pinned: bool) -> None:
        if tier is self._compute and is_pinned and self._is_last(tier):
            self.wrong(at, 3, f"{action}: it is in use at this moment")
        if tier in self._under_way or any(src is tier for src, _ in self._under_way.values()):
            self.wrong(at, 5, f"{action}: a transfer still uses these slots")
        if tier not in self._room:
            if tier is self._home:
                self.wrong(at, 4, f"{action}: this is its home")
            else:
                self.wrong(at, 2, f"{action}: it has no slots there")
            return
        was_last = self._is_last(tier)
        self._bytes.pop(tier, None)
        if was_last and not any(map(self._is_last, Tier)):
            self.wrong(at, 4, f"{action}: it is the last valid copy")
        self._room.discard(tier)
        self.changes.append((at, tier, -self._slots))

    def _create(self, at: _At, action: Issue, tier: Tier) -> None:
        if self._writer is not None:
            self.wrong(at, 8 if self._ref.plane == GRAD else 4, f"{action}: it has contents")
        if tier is Tier.DISK or tier not in self._way:
            self.wrong(at, 9, f"{action}: first contents are made in memory on its way home")
        if self._room:
            self.wrong(at, 5, f"{action}: it has slots already")
        elif self._needs_room(tier):
            self._take(at, action, tier)
        self.write(at, tier)

    def _take(self, at: _At, action: Action, tier: Tier) -> None:
        if tier in self._room:
            self.wrong(at, 5, f"{action}: it has slots on the {tier.label} already")
            return
        self._room.add(tier)
        self.changes.append((at, tier, self._slots))

    def use(self, at: _At, tier: Tier, *, by: int | None) -> None:
        """A moment reads or writes the unit on this tier. `by`: the chunk whose update that is."""
        for update in self._updates:
            if update.of.chunk != by and not (by is not None and self._is_shared_with(update, tier)):
                self.wrong(at, 10, f"{self._ref} is used before the wait for {update}")
        if tier in self._under_way and by is not None and self._ref.plane == GRAD:
            if self._under_way[tier][1] != self._writer:
                self.wrong(at, 1, f"{self._ref} is used but older contents are on their way to the {tier.label}")
            return
        if tier in self._under_way:
            self.wrong(at, 5, f"{self._ref} is used before the wait for its transfer")
        if self._writer is None or self._bytes.get(tier) is None:
            self.wrong(at, 1, f"{self._ref} is used but is not on the {tier.label}")
        elif not self._is_last(tier):
            self.wrong(at, 1, f"{self._ref} is used but the {tier.label} holds older contents")

    def write(self, at: _At, tier: Tier) -> None:
        """Somebody writes the unit on this tier: these bytes are nowhere else."""
        if self._under_way:
            self.wrong(at, 5, f"{self._ref} is written while a transfer reads it")
        self._writer = self._bytes[tier] = f"moment {at[0]}, {at[1]}"

    def free(self, at: _At) -> None:
        """Nobody wants the unit's contents any more."""
        self._is_unwanted = bool(self._updates)
        if self._is_unwanted:  # from the end of the update on
            return
        if self._under_way:
            self.wrong(at, 5, f"{self._ref} is freed while it is on its way")
        self._writer = None
        self._bytes.clear()

    def end(self, at: _At, end: Snapshot, *, may_be_lost: bool) -> None:
        """Compares with what the plan says of its end."""
        ref = self._ref
        for tier, (src, _) in self._under_way.items():
            if end.in_flight.get(ref) != (src, tier):
                self.wrong(at, 5, f"the transfer of {ref} to the {tier.label} was never waited for")
        if ref in end.in_flight and end.in_flight[ref][1] not in self._under_way:
            self.wrong(at, 9, f"{ref} is not on its way to the {end.in_flight[ref][1].label}, as the plan says")
        if self._writer is None and not may_be_lost:
            self.wrong(at, 9, f"{ref} has lost its contents")
        newest = {tier for tier in Tier if self._is_last(tier)}
        room = {tier for tier, refs in end.taken.items() if ref in refs}
        if newest != end.newest.get(ref, frozenset()):
            said = _names(end.newest.get(ref, ()))
            self.wrong(at, 9, f"the last contents of {ref} are on {_names(newest)}, the plan says {said}")
        if room != self._room:
            self.wrong(at, 9, f"{ref} has slots on {_names(self._room)}, the plan says {_names(room)}")


def _add_up(histories: Iterable[_History], start: Snapshot, trace: Trace, machine: Machine, found: _Found) -> None:
    """Finds places where slots are taken, and moments, at which units together take more of a tier than there is beside non-model bytes."""
    compute, used = start.compute, dict.fromkeys(Tier, 0)
    for tier in Tier:
        if tier is not compute:
            resting = sum(start.slots[ref] for ref, home in start.home.items() if home is tier) * start.slot_bytes
            if resting > machine.budget.get(tier, 0):
                found.append((_START, 2, _overfull(tier, resting, 0, machine)))
    changes = [change for history in histories for change in history.changes]
    moments = [((index, _USE), tier, 0) for index in range(len(trace)) for tier in start.taken]
    for at, tier, slots in sorted([*changes, *moments], key=lambda change: change[0]):
        used[tier] += slots * start.slot_bytes
        # What a plan starts with may exceed a budget until it has evicted.
        if at != _START and slots >= 0:
            others = trace.moments[at[0]].nonmodel_bytes if tier is compute and at[0] < len(trace) else 0
            if used[tier] + others > machine.budget.get(tier, 0):
                found.append((at, 2, _overfull(tier, used[tier], others, machine)))


def _overfull(tier: Tier, used: int, others: int, machine: Machine) -> str:
    return f"the {tier.label} holds {used} bytes of chunks and {others} others; budget {machine.budget.get(tier, 0)}"


def _names(tiers: Iterable[Tier]) -> str:
    return " and ".join(f"the {tier.label}" for tier in sorted(tiers, key=lambda tier: tier.label)) or "no tier"
