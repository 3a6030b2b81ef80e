"""Invariants of every plan. `check()` returns violations; it never repairs.

(1) A unit touched or held at a moment is resident on the compute tier then, arrived, with its last contents.
    Otherwise an operation reads bytes still in flight, or older than what was written.
(2) Slots in use plus non-model bytes never exceed a tier's budget, and no slot is given back twice.
    A budget is a promise about what the process holds.
(3) A pinned unit is neither moved nor dropped.
    Somebody has its address: an operation, or a tensor that autograd saved.
(4) The last valid copy of a unit is never dropped, nor is a stale one copied in its place.
    A clean copy may go without a transfer only because another tier holds the same bytes.
(5) Each issue has exactly one wait, before first use and before its slots are used for anything else.
    A transfer that nobody waits for may read or write its slots at any later time.
(6) All ranks of a group issue the same collectives in the same order.
    Otherwise they wait for each other for ever. One rank has none: any action that is not one of the four local kinds
    is a violation.
(7) What leaves a tier is the local shard, never the gathered chunk.
    One rank's shard is the whole unit: a copy carries exactly its slots, as do the slots it takes and gives back.
(8) Each gradient is reduced once per step boundary.
    One rank has nothing to reduce, but the same mistake to make: a gradient that has contents is not begun again
    from zeros, or what was accumulated is lost.
(9) A step ends where it began: nothing in flight or staged, homes unchanged, no contents lost, and the end that is
    written down is where the actions lead.
    Otherwise the next plan starts from a state that is not there.

The replay here shares no code with `residency.apply`. It knows nothing of clean and dirty: every write makes a new
version of a unit, copies carry versions, and a tier is valid where it holds the newest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from types import MappingProxyType

from patrickstar.core.layout import Layout
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import GRAD, PlaneRef
from patrickstar.core.trace import Moment, Rows, Trace
from patrickstar.plan.actions import Action, Copy, Create, Drop, Wait
from patrickstar.plan.plan import Condition, Plan, Snapshot

_PLACE = re.compile(r"\(\d\) moment (\d+) ")


def check(plan: Plan, trace: Trace, layout: Layout, machine: Machine) -> list[str]:
    """Violations, in the order of the plan, as `(4) moment 17 backward h.3.mlp.w1: c3.weight D!: ...`."""
    replay = _Replay(plan.start, machine)
    replay.where = "the plan"
    if plan.layout != layout.digest():
        replay.violated(9, f"it is for layout {plan.layout}, not {layout.digest()}")
    if len(plan.moments) != len(trace):
        replay.violated(9, f"it has {len(plan.moments)} moments, the trace {len(trace)}")
    freed_after = plan.freed_after()
    for index, (moment, actions) in enumerate(zip(trace.moments, plan.moments, strict=False)):
        replay.where = f"moment {trace.name(index)}"
        pinned = {touch.ref for touch in moment.touches} | set(moment.held)
        for action in actions:
            replay.act(action, pinned, moment)
        replay.happen(moment, pinned)
        for ref in freed_after.get(index, ()):
            replay.free(ref)
    replay.where = "the end"
    replay.end(plan.end, freed={ref for _, ref in plan.frees})
    return replay.violations


def show(violations: Iterable[str], plan: Plan, trace: Trace) -> str:
    """Violations for people: each with the moments around it, and the actions before each, the place marked.

    (1) moment 1 forward p1: c1.weight is used but is not on the host
           0 forward p0 0 c0.weight  <-  c0.weight K>H, c0.weight H?
      >    1 forward p1 0 c1.weight  <-
           2 forward p2 0 c2.weight  <-  c1.weight H!, c2.weight K>H, c2.weight H?
    """
    lines = []
    for violation in violations:
        lines.append(violation)
        place = _PLACE.match(violation)
        if place is None:
            continue
        here = int(place[1])
        for index in range(max(0, here - 1), min(here + 2, len(trace), len(plan.moments))):
            mark, actions = ">" if index == here else " ", ", ".join(map(str, plan.moments[index]))
            lines.append(f"  {mark} {index:4} {trace.moments[index]}  <-  {actions}".rstrip())
    return "\n".join(lines)


class _Replay:
    """Versions of every unit on every tier, and the slots they take, action by action.

    Attributes:
        newest: the version last written; 0 for a unit without contents.
        held: versions that have arrived, by unit and tier.
        flights: transfers not waited for, by unit and where to: where from, and the version they carry.
        taken: slots in use outside homes below the compute tier, by unit and tier.
        used: bytes of each tier in use.
    """

    def __init__(self, start: Snapshot, machine: Machine) -> None:
        self.start = start
        self.machine = machine

        self.where = ""
        self.violations: list[str] = []
        self.newest: dict[PlaneRef, int] = {}
        self.held: dict[tuple[PlaneRef, Tier], int] = {}
        self.flights: dict[tuple[PlaneRef, Tier], tuple[Tier, int]] = {}
        self.taken: dict[tuple[PlaneRef, Tier], int] = {}
        self.used = dict.fromkeys(Tier, 0)
        for ref, home in start.home.items():
            self._begin(ref, home)
        self.where = "the start"
        for tier in Tier:
            if tier is not start.compute:
                self._expect_within_budget(tier)

    def _begin(self, ref: PlaneRef, home: Tier) -> None:
        compute, slots = self.start.compute, self.start.slots[ref]
        condition = self.start.condition(ref)
        if home is not compute:
            self.used[home] += slots * self.start.slot_bytes
        if condition not in (Condition.FREE, Condition.AWAY):
            self._take(ref, compute, slots)
        if condition in (Condition.FREE, Condition.VOID):
            self.newest[ref] = 0
            return
        self.newest[ref] = 2 if condition is Condition.DIRTY else 1
        if home is not compute:
            self.held[ref, home] = 1
        if condition is not Condition.AWAY:
            self.held[ref, compute] = self.newest[ref]

    def violated(self, number: int, text: str) -> None:
        self.violations.append(f"({number}) {self.where}: {text}")

    def act(self, action: Action, pinned: Collection[PlaneRef], moment: Moment) -> None:
        if action.ref not in self.start.home:
            self.violated(9, f"{action}: there is no such unit")
            return
        if not isinstance(action, Wait) and action.slots != self.start.slots[action.ref]:
            self.violated(7, f"{action}: the unit takes {self.start.slots[action.ref]} slots")
        if isinstance(action, Copy):
            self._copy(action, pinned)
        elif isinstance(action, Wait):
            self._wait(action)
        elif isinstance(action, Drop):
            self._drop(action, pinned)
        elif isinstance(action, Create):
            self._create(action)
        else:
            self.violated(6, f"{action}: not an action of one rank")
        if isinstance(action, Copy | Create):
            # Only where slots are taken: what a plan starts with may exceed a budget until it has evicted.
            tier = action.dst if isinstance(action, Copy) else action.tier
            if tier is not self.start.home[action.ref] or tier is self.start.compute:
                self._expect_within_budget(tier, moment.nonmodel_bytes if tier is self.start.compute else 0)

    def _copy(self, action: Copy, pinned: Collection[PlaneRef]) -> None:
        ref, src, dst = action.ref, action.src, action.dst
        home, compute = self.start.home[ref], self.start.compute
        if src is compute and ref in pinned:
            self.violated(3, f"{action}: it is in use at this moment")
        if abs(_DEPTH[src] - _DEPTH[dst]) != 1 or not all(_between(tier, compute, home) for tier in (src, dst)):
            self.violated(9, f"{action}: it rests on the {home.label}, and this is not its way there or back")
        if (ref, src) in self.flights:
            self.violated(5, f"{action}: the transfer to the {src.label} has not been waited for")
        elif self.newest[ref] == 0 or self.held.get((ref, src), 0) < self.newest[ref]:
            self.violated(4, f"{action}: the {src.label} does not hold its last contents")
        if (ref, dst) in self.flights:
            self.violated(5, f"{action}: issued again before its wait")
        if dst is not home:
            if (ref, dst) in self.taken:
                self.violated(5, f"{action}: it has slots on the {dst.label} already")
            else:
                self._take(ref, dst, action.slots)
        self.flights[ref, dst] = src, self.held.get((ref, src), 0)
        self.held.pop((ref, dst), None)

    def _wait(self, action: Wait) -> None:
        ref, tier = action.ref, action.tier
        if (ref, tier) not in self.flights:
            self.violated(5, f"{action}: no such transfer has been issued")
            return
        _, self.held[ref, tier] = self.flights.pop((ref, tier))

    def _drop(self, action: Drop, pinned: Collection[PlaneRef]) -> None:
        ref, tier = action.ref, action.tier
        if tier is self.start.compute and ref in pinned and self.newest[ref]:
            self.violated(3, f"{action}: it is in use at this moment")
        if (ref, tier) in self.flights or any(at == ref and src is tier for (at, _), (src, _) in self.flights.items()):
            self.violated(5, f"{action}: a transfer still uses these slots")
        if (ref, tier) not in self.taken:
            if tier is self.start.home[ref]:
                self.violated(4, f"{action}: this is its home")
            else:
                self.violated(2, f"{action}: it has no slots there")
            return
        version = self.held.pop((ref, tier), 0)
        newest = self.newest[ref]
        if newest and version == newest and not any(self.held.get((ref, other)) == newest for other in Tier):
            self.violated(4, f"{action}: it is the last valid copy")
        self._give(ref, tier)

    def _create(self, action: Create) -> None:
        ref, compute = action.ref, self.start.compute
        if self.newest[ref]:
            self.violated(8 if ref.plane == GRAD else 4, f"{action}: it has contents")
        if action.tier is not compute and not (action.tier is Tier.HOST is self.start.home[ref]):
            self.violated(9, f"{action}: first contents are made on the {compute.label}, or at home on the host")
        if any(at == ref for at, _ in self.taken):
            self.violated(5, f"{action}: it has slots already")
        elif action.tier is compute:
            self._take(ref, action.tier, action.slots)
        self._write(ref, action.tier)

    def happen(self, moment: Moment, pinned: Collection[PlaneRef]) -> None:
        """Replays a moment itself: what it uses must be there, what it writes is newer than every other copy."""
        compute = self.start.compute
        for ref in sorted(pinned):
            if (ref, compute) in self.flights:
                self.violated(5, f"{ref} is used before the wait for its transfer")
            newest = self.newest.get(ref, 0)
            version = self.held.get((ref, compute), 0)
            if not version:
                self.violated(1, f"{ref} is used but is not on the {compute.label}")
            elif version < newest:
                self.violated(1, f"{ref} is used but the {compute.label} holds older contents")
        for touch in moment.touches:
            if touch.writes and touch.ref in self.newest:
                if any(at == touch.ref and src is compute for (at, _), (src, _) in self.flights.items()):
                    self.violated(5, f"{touch.ref} is written while a transfer reads it")
                self._write(touch.ref, compute)
        if moment.rows is not None:
            self._use_rows(moment.rows)
        self._expect_within_budget(compute, moment.nonmodel_bytes)

    def _use_rows(self, rows: Rows) -> None:
        for ref in rows.refs:
            home, newest = self.start.home[ref], self.newest.get(ref, 0)
            if any(at == ref for at, _ in self.flights):
                self.violated(5, f"rows of {ref} are used while it is on its way")
            if not newest or self.held.get((ref, home), 0) < newest:
                self.violated(1, f"rows of {ref} are used, and the {home.label} does not hold its last contents")
            if rows.writes:
                if (ref, self.start.compute) in self.taken:
                    self.violated(1, f"rows of {ref} are added to on the {home.label} while it has slots elsewhere")
                self._write(ref, home)

    def _write(self, ref: PlaneRef, tier: Tier) -> None:
        self.newest[ref] += 1
        self.held[ref, tier] = self.newest[ref]

    def free(self, ref: PlaneRef) -> None:
        """Replays that nobody wants the unit's contents any more."""
        if any(at == ref for at, _ in self.flights):
            self.violated(5, f"{ref} is freed while it is on its way")
        self.newest[ref] = 0
        for tier in Tier:
            self.held.pop((ref, tier), None)

    def end(self, end: Snapshot, *, freed: Collection[PlaneRef]) -> None:
        """Checks the state after the last moment: everything arrived, nothing lost, and all of it written down."""
        start = self.start
        for ref, tier in sorted(self.flights):
            self.violated(5, f"the transfer of {ref} to the {tier.label} was never waited for")
        for ref, tier in sorted(self.taken):
            if tier is not start.compute:
                self.violated(9, f"{ref} is still staged on the {tier.label}")
        if (end.compute, end.slot_bytes, end.home, end.slots) != (
            start.compute,
            start.slot_bytes,
            start.home,
            start.slots,
        ):
            self.violated(9, "homes or sizes of units are not those of the start")
            return
        for ref in sorted(start.home):
            condition = self._condition(ref)
            if ref not in start.free and ref not in freed and condition in (Condition.FREE, Condition.VOID):
                self.violated(9, f"{ref} has lost its contents")
            if condition is not end.condition(ref):
                self.violated(9, f"{ref} is {condition.value}, the plan says {end.condition(ref).value}")

    def _condition(self, ref: PlaneRef) -> Condition:
        compute, home, newest = self.start.compute, self.start.home[ref], self.newest[ref]
        here = (ref, compute) in self.taken
        if not newest:
            return Condition.VOID if here else Condition.FREE
        if not here:
            return Condition.AWAY
        if home is compute:
            return Condition.HERE
        return Condition.CLEAN if self.held.get((ref, home), 0) == newest else Condition.DIRTY

    def _take(self, ref: PlaneRef, tier: Tier, slots: int) -> None:
        self.taken[ref, tier] = slots
        self.used[tier] += slots * self.start.slot_bytes

    def _give(self, ref: PlaneRef, tier: Tier) -> None:
        self.used[tier] -= self.taken.pop((ref, tier)) * self.start.slot_bytes

    def _expect_within_budget(self, tier: Tier, nonmodel_bytes: int = 0) -> None:
        used, budget = self.used[tier], self.machine.budget.get(tier, 0)
        if used + nonmodel_bytes > budget:
            self.violated(
                2, f"the {tier.label} holds {used} bytes of chunks and {nonmodel_bytes} others; budget {budget}"
            )


_DEPTH = MappingProxyType({Tier.DEVICE: 0, Tier.HOST: 1, Tier.DISK: 2})


def _between(tier: Tier, compute: Tier, home: Tier) -> bool:
    """Tells whether a tier lies on the way between the one that computes and a home below it."""
    return _DEPTH[compute] <= _DEPTH[tier] <= _DEPTH[home]
