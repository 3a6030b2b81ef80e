"""The pilot: answers one question, what must happen before this moment.

Inside a stretch (a forward with its backward, the norm, the optimizer's step) that has a plan, the answer is read off the plan, as long as
the moments come as its trace has them. From the first that does not, and where there is no plan, the answer is decided on the spot, by the
same rule and with the same actions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from patrickstar.core.fixed_costs import FixedCosts
from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.errors import BudgetError
from patrickstar.plan.actions import Action, Drop, Issue, Wait, Work
from patrickstar.plan.eviction import Uses, Worth, eviction_order, policy_named
from patrickstar.plan.fit import refuse_host
from patrickstar.plan.plan import Plan
from patrickstar.plan.residency import Residency, apply
from patrickstar.plan.room import capacity_of, make_room
from patrickstar.plan.staging import NoRoom, Order
from patrickstar.plan.whole_chunks import WholeChunks
from patrickstar.units import format_bytes

__all__ = ["Pilot", "Planned", "Reactive", "Stretch", "StretchKind"]


class StretchKind(str, Enum):
    """Kinds of stretch: the parts of a step."""

    TRAINING = "training step"
    EVALUATION = "evaluation"
    NORM = "norm"
    UPDATE = "step"
    OUTSIDE = "outside"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Planned:
    """The course of a stretch whose moments come as its trace has them: what happens before each is read off the plan."""

    plan: Plan
    trace: Trace


@dataclass(frozen=True, slots=True)
class Reactive:
    """The course of a stretch whose moments are decided on the spot, for a reason. `plan`, `trace`: those departed from, if any."""

    reason: str
    plan: Plan | None = None
    trace: Trace | None = None


@dataclass(slots=True)
class Stretch:
    """A stretch of a step that is planned as one: what is expected of it, its course, and how far it has come.

    `reserve_bytes` is the room that is left to non-model data where moments are decided on the spot.
    `lets_go`: units that the plan has let go of before moment `lets_go_at`, and nobody has yet; `let_go_at`: the moment before which somebody did.
    """

    kind: StretchKind
    course: Planned | Reactive = Reactive("")
    reserve_bytes: int = 0

    position: int = 0
    gave_gradients: bool = False
    lets_go: set[PlaneRef] = field(default_factory=set)
    lets_go_at: int = 0
    let_go_at: int = 0
    differentiates: bool = False  # a backward of it has made a graph
    is_over: bool = False  # its backward has ended, or an exception has ended it
    own_trace: Trace | None = None  # that of its forward and backward alone, where others' moments are woven between
    whole: WholeChunks | None = None  # the chunks that its backward updates whole
    opened_at: int = -1  # the moment before which what must happen has happened already
    foreseen: Trace | None = None  # that of the plan, without what an allocator keeps
    excess_bytes: int = 0  # by which some moment took more of a device than that
    worth: Worth | None = field(default=None, repr=False)

    def depart(self, reason: str) -> None:
        """Makes the stretch reactive: its moments are decided on the spot from here on. The first reason stays."""
        if isinstance(self.course, Planned):
            self.course = Reactive(reason, self.course.plan, self.course.trace)

    @property
    def plan(self) -> Plan | None:
        """The plan that the stretch follows, or followed."""
        return self.course.plan

    @property
    def trace(self) -> Trace | None:
        """The trace that the stretch goes by, or went by."""
        return self.course.trace

    @property
    def reason(self) -> str:
        """The reason why moments are decided on the spot; empty where the plan is followed."""
        return self.course.reason if isinstance(self.course, Reactive) else ""

    @property
    def complete(self) -> bool:
        """True once every moment of the trace has come, as planned."""
        return isinstance(self.course, Planned) and self.position == len(self.course.trace.moments)


class Pilot:
    """Decides what must happen, moment by moment. Moves nothing.

    Args:
        state: where every unit is now; the store changes it.
        budget_bytes: what the compute tier may hold now, slots and non-model data together. host_bytes: what the host may, below a device.
        policy: "next-use" or "lru".
        spare_bytes: of the budget, to be left free where that can be.
        costs: what the budget that the user gave holds beside, for refusals.

    Attributes:
        capacity_slots: how many slots may be in use at the moment that was asked about last.
    """

    def __init__(
        self,
        state: Residency,
        *,
        budget_bytes: Callable[[], int],
        policy: str,
        host_bytes: int = 0,
        spare_bytes: int = 0,
        costs: FixedCosts = FixedCosts(),  # noqa: B008  (frozen)
    ) -> None:
        self.costs = costs
        self._state = state
        self._budget_bytes = budget_bytes
        self._policy = policy
        self._host_bytes = host_bytes
        self._spare_bytes = spare_bytes

        self.stretch = Stretch(StretchKind.OUTSIDE)
        self.capacity_slots = 0
        self._handicap_bytes = 0
        self._clock = 0
        self._last_use: dict[PlaneRef, int] = {}

    def begin(self, stretch: Stretch) -> None:
        """Begins a stretch: the next moments belong to it."""
        self.stretch = stretch
        self._handicap_bytes = 0

    def opening(self, held: Collection[PlaneRef]) -> Sequence[Action]:
        """Actions that may be done as soon as the stretch begins, so that what is allocated before its first moment finds room."""
        stretch, state = self.stretch, self._state
        at = stretch.position
        match stretch.course:
            case Planned(plan, trace) if at < len(trace.moments) and not self._drops_held(plan.moments[at], held):
                stretch.opened_at = at
                self.capacity_slots = (
                    plan.machine.budget[state.compute] - trace.moments[at].nonmodel_bytes
                ) // state.slot_bytes
                return plan.moments[at]
        withheld = stretch.reserve_bytes + self._spare_bytes
        self.capacity_slots = (self._budget_bytes() - withheld) // state.slot_bytes
        try:
            return self._make_room((), held, self.capacity_slots)
        except NoRoom:
            return ()  # what is in use now may leave before the first moment, which decides

    def next_update(self) -> Moment | None:
        """The update that the plan has before the next moment of anything else; None where it has none."""
        stretch = self.stretch
        if isinstance(stretch.course, Planned) and not stretch.complete:
            moment = stretch.course.trace.moments[stretch.position]
            return moment if moment.updates is not None else None
        return None

    def let_go(self, ref: PlaneRef) -> bool:
        """Tells whether the plan has it that a unit's contents are let go of now: its slots then stay until the plan gives them back.

        Where the plan has not, the stretch departs.
        """
        stretch = self.stretch
        if not isinstance(stretch.course, Planned) or stretch.complete:
            return False
        if ref in stretch.lets_go and stretch.position == stretch.lets_go_at:
            stretch.lets_go.discard(ref)
            return True
        stretch.let_go_at = stretch.position
        stretch.depart(
            f"{ref} was released before op {stretch.position} of the {stretch.kind}, which its plan does not expect"
        )
        return False

    def clearing(self, slot_bytes: int, held: Collection[PlaneRef]) -> Sequence[Action]:
        """Actions by which slots take no more than these bytes, as far as what is held allows; makes the stretch reactive."""
        stretch, state = self.stretch, self._state
        stretch.depart(f"the {stretch.kind} took more memory at op {stretch.position} than its trace has")
        here = state.taken[state.compute]
        pinned = sum(state.slots[ref] for ref in here if ref in held or state.home[ref] is state.compute)
        return self._make_room((), held, max(slot_bytes // state.slot_bytes, pinned))

    def yield_bytes(self, nbytes: int, *, slots: int) -> None:
        """Leaves chunks less room until the stretch ends: `nbytes` less than `slots` take, since something else has taken these bytes."""
        room = max(0, slots * self._state.slot_bytes - nbytes)
        withheld = self.stretch.reserve_bytes + self._spare_bytes
        self._handicap_bytes = max(self._handicap_bytes, self._budget_bytes() - withheld - room)
        self.stretch.depart(f"{format_bytes(nbytes)} more are allocated than the plan has")

    def actions(
        self,
        phase: Phase,
        label: str,
        touches: Sequence[Touch],
        held: Collection[PlaneRef],
        *,
        update: Work | None = None,
    ) -> Sequence[Action]:
        """Actions that must be done before a moment that touches these units, while `held` are in use.

        `update`: what begins with the moment.

        Raises:
            BudgetError: what the moment needs at once does not fit.
        """
        planned = self.planned(phase, touches, held)
        return self.decided(phase, label, touches, held, update) if planned is None else planned

    def planned(self, phase: Phase, touches: Sequence[Touch], held: Collection[PlaneRef]) -> Sequence[Action] | None:
        """Actions that the plan has before such a moment, which is the next one; None where there is no plan, or it is followed no longer."""
        self._clock += 1
        for touch in touches:
            self._last_use[touch.ref] = self._clock
        stretch = self.stretch
        # What reads state after the last moment (gradients, a checkpoint) is no part of the stretch.
        if isinstance(stretch.course, Planned) and not (phase is Phase.STEP and stretch.complete):
            planned = self._planned(stretch.course, phase, touches, held)
            if planned is not None:
                stretch.position += 1
                return planned
        return None

    def _planned(
        self,
        course: Planned,
        phase: Phase,
        touches: Sequence[Touch],
        held: Collection[PlaneRef],
    ) -> Sequence[Action] | None:
        """Actions that the plan has before a moment; None where the plan is followed no longer."""
        stretch = self.stretch
        number, moments = stretch.position, course.trace.moments
        if number == len(moments):
            stretch.depart(f"the {stretch.kind} has more than the {number} ops of its trace")
            return None
        if stretch.lets_go and number >= stretch.lets_go_at:
            stretch.depart(
                f"{min(stretch.lets_go)} was not released before op {number} of the {stretch.kind}, as it was the last time"
            )
            return None
        moment = moments[number]
        if moment.phase is not phase or moment.touches != tuple(touches):
            came = " ".join(map(str, touches))
            stretch.depart(f"op {number} of the {stretch.kind} is {phase} {came}, the trace has {moment}")
            return None
        actions: Sequence[Action] = () if stretch.opened_at == number else course.plan.moments[number]
        dropped = self._drops_held(actions, held) if actions else None
        if dropped is not None:
            stretch.depart(
                f"{dropped} is still in use at op {number} of the {stretch.kind}, which its trace does not have"
            )
            return None
        budget = course.plan.machine.budget[self._state.compute]
        self.capacity_slots = (budget - moment.nonmodel_bytes) // self._state.slot_bytes
        return actions

    def nearest(self, touches: Iterable[Touch]) -> tuple[Touch, ...]:
        """The touches by which these units are used where their last contents are: reading or setting a value moves no more than it must.

        What only the tiers below the device have is used on the host, if the host has room for all of it at once.
        """
        state, found = self._state, tuple(touches)
        if state.compute is Tier.HOST:
            return found
        below = {touch.ref for touch in found if state.tier_of(touch.ref) in (Tier.HOST, Tier.DISK)}
        room = capacity_of(state, 0, host_bytes=self._host_bytes)[Tier.HOST]
        if sum(state.slots[ref] for ref in below if state.home[ref] is Tier.DISK) > room:
            return found
        return tuple(touch._replace(tier=Tier.HOST) if touch.ref in below else touch for touch in found)

    def _drops_held(self, actions: Sequence[Action], held: Collection[PlaneRef]) -> PlaneRef | None:
        """A unit in use that these actions would drop, if there is one."""
        for action in actions:
            if isinstance(action, Drop) and action.tier is self._state.compute and action.of in held:
                return action.of
        return None

    def decided(
        self,
        phase: Phase,
        label: str,
        touches: Sequence[Touch],
        held: Collection[PlaneRef],
        update: Work | None = None,
    ) -> Sequence[Action]:
        """Actions for such a moment that are decided on the spot, whatever the plan says. BudgetError: what it needs at once does not fit."""
        room = self._room_for(phase, label, touches, held)
        return room if update is None else [*room, Issue(update), Wait(update)]

    def _room_for(
        self, phase: Phase, label: str, touches: Sequence[Touch], held: Collection[PlaneRef]
    ) -> Sequence[Action]:
        stretch = self.stretch
        budget, slot_bytes = self._budget_bytes(), self._state.slot_bytes
        withheld = stretch.reserve_bytes + self._handicap_bytes + self._spare_bytes
        self.capacity_slots = (budget - withheld) // slot_bytes
        try:
            return self._make_room(touches, held, self.capacity_slots)
        except NoRoom as refusal:
            if refusal.tier is not self._state.compute:
                moment = f"{stretch.position} {phase} {label}"
                raise refuse_host(
                    refusal.needed_slots, moment, state=self._state, host_bytes=self._host_bytes
                ) from None
            needed_slots = refusal.needed_slots
        # The reserve is a forecast; what is asked for now is a fact, and stays alone. The meter, where there is one, has the last word.
        needed_bytes = needed_slots * slot_bytes
        if needed_bytes > budget:
            fixed_bytes = self.costs.beside(needed_bytes)
            needed_bytes += fixed_bytes
            budget += self.costs.set_aside_bytes
            fixed = f" + fixed costs {format_bytes(fixed_bytes)}" if fixed_bytes else ""
            raise BudgetError(
                f"{self._state.compute.label} memory is {format_bytes(needed_bytes - budget)} short at {phase} {label}\n"
                f"  needed {format_bytes(needed_bytes)} = {needed_slots} chunk slots of {format_bytes(slot_bytes)} in use at once{fixed}; "
                f"budget {format_bytes(budget)}\n"
                "  release views of parameters and of gradients that still pin slots (session.state_dict() reads one tensor at a time, "
                "session.export(dir) writes them as save_pretrained does), or give a larger budget",
                tier=self._state.compute.label,
                moment=f"{stretch.position} {phase} {label}",
                needed_bytes=needed_bytes,
                available_bytes=budget,
                smallest_bytes=needed_bytes,
                fixed_bytes=fixed_bytes,
            )
        self.capacity_slots = needed_slots
        return self._make_room(touches, held, needed_slots)

    def _make_room(self, touches: Sequence[Touch], held: Collection[PlaneRef], capacity_slots: int) -> Sequence[Action]:
        state = self._state
        capacity = capacity_of(state, capacity_slots, host_bytes=self._host_bytes)
        waits = [Wait(update) for update in state.updates]
        if waits:
            state = state.copy()
            for wait in waits:
                apply(state, wait)
        return [
            *waits,
            *make_room(state, touches=touches, held=held, capacity=capacity, order=self._order(self.stretch)),
        ]

    def _order(self, stretch: Stretch) -> Order:
        if stretch.trace is not None and stretch.position < len(stretch.trace.moments):
            if stretch.worth is None:
                stretch.worth = policy_named(self._policy)(Uses(stretch.trace))
            worth, now = stretch.worth, stretch.position
            return lambda tier, refs: eviction_order(refs, state=self._state, tier=tier, worth=worth, now=now)
        return lambda _, refs: sorted(refs, key=lambda ref: (self._last_use.get(ref, -1), ref))
