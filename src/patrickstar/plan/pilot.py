"""The pilot: answers one question, what must happen before this moment.

As long as moments come as the trace of a plan has them, the answer is read off the plan. From the first that does not, and where there is no plan, it
is decided on the spot, by the same rule and with the same actions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from patrickstar.core.fixed_costs import FixedCosts
from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Phase, Touch
from patrickstar.plan.actions import Action, Issue, Wait, Work
from patrickstar.plan.eviction import POLICIES, Uses, Worth, eviction_order
from patrickstar.plan.fit import Need, refuse_host, refuse_moment
from patrickstar.plan.make_room import NoRoom, Order, capacity_of, make_room
from patrickstar.plan.residency import Residency, apply
from patrickstar.plan.stretch import Stretch, StretchKind
from patrickstar.units import format_bytes


@dataclass(eq=False)
class Pilot:
    """Decides what must happen, moment by moment. Moves nothing.

    Attributes:
        state: where every unit is now; the store changes it.
        budget_bytes: what the compute tier may hold now, slots and non-model data together. host_bytes: what the host may, below a device.
        policy: "next-use" or "lru".
        spare_bytes: of the budget, to be left free where that can be.
        costs: what the budget that the user gave holds beside, for refusals.
        capacity_slots: how many slots may be in use at the moment that was asked about last.
    """

    state: Residency
    _: KW_ONLY
    budget_bytes: Callable[[], int]
    policy: str
    host_bytes: int = 0
    spare_bytes: int = 0
    costs: FixedCosts = field(default_factory=FixedCosts)

    stretch: Stretch = field(default_factory=lambda: Stretch(StretchKind.OUTSIDE), init=False)
    capacity_slots: int = field(default=0, init=False)
    _worth: Worth | None = field(default=None, init=False)  # of what the stretch under way uses
    _handicap_bytes: int = field(default=0, init=False)
    _clock: int = field(default=0, init=False)
    _last_use: dict[PlaneRef, int] = field(default_factory=dict, init=False)

    def begin(self, stretch: Stretch) -> None:
        """Begins a stretch: the next moments belong to it."""
        self.stretch = stretch
        self._worth = None
        self._handicap_bytes = 0

    def opening(self, held: Collection[PlaneRef]) -> Sequence[Action]:
        """Actions that may be done as soon as the stretch begins, so that what is allocated before its first moment finds room."""
        stretch = self.stretch
        actions = stretch.open(held)
        if actions is not None:
            self.capacity_slots = stretch.room_bytes // self.state.slot_bytes
            return actions
        withheld = stretch.reserve_bytes + self.spare_bytes
        self.capacity_slots = (self.budget_bytes() - withheld) // self.state.slot_bytes
        try:
            return self._make_room((), held, self.capacity_slots)
        except NoRoom:
            return ()  # what is in use now may leave before the first moment, which decides

    def clearing(self, slot_bytes: int, held: Collection[PlaneRef]) -> Sequence[Action]:
        """Actions by which slots take no more than these bytes, as far as what is held allows; makes the stretch reactive."""
        stretch, state = self.stretch, self.state
        stretch.depart(f"the {stretch.kind} took more memory at op {stretch.position} than its trace has")
        here = state.taken[state.compute]
        pinned = sum(state.slots[ref] for ref in here if ref in held or state.home[ref] is state.compute)
        return self._make_room((), held, max(slot_bytes // state.slot_bytes, pinned))

    def yield_bytes(self, nbytes: int, *, slots: int) -> None:
        """Leaves chunks less room until the stretch ends: `nbytes` less than `slots` take, since something else has taken these bytes."""
        room = max(0, slots * self.state.slot_bytes - nbytes)
        withheld = self.stretch.reserve_bytes + self.spare_bytes
        self._handicap_bytes = max(self._handicap_bytes, self.budget_bytes() - withheld - room)
        self.stretch.depart(f"{format_bytes(nbytes)} more are allocated than the plan has")

    def planned(self, phase: Phase, touches: Sequence[Touch], held: Collection[PlaneRef]) -> Sequence[Action] | None:
        """Actions that the plan has before such a moment, which is the next one; None where there is no plan, or it is followed no longer."""
        self._clock += 1
        for touch in touches:
            self._last_use[touch.ref] = self._clock
        stretch = self.stretch
        # What reads state after the last moment (gradients, a checkpoint) is no part of the stretch.
        if stretch.followed is None or (phase is Phase.STEP and stretch.complete):
            return None
        actions = stretch.follow(phase, touches, held)
        if actions is not None:
            self.capacity_slots = stretch.room_bytes // self.state.slot_bytes
        return actions

    def nearest(self, touches: Iterable[Touch]) -> tuple[Touch, ...]:
        """The touches by which these units are used where their last contents are: reading or setting a value moves no more than it must.

        What only the tiers below the device have is used on the host, if the host has room for all of it at once.
        """
        state, found = self.state, tuple(touches)
        if state.compute is Tier.HOST:
            return found
        below = {ref for ref, _, _ in found if not (state.is_free(ref) or state.is_newest(ref, state.compute))}
        room = capacity_of(state, 0, host_bytes=self.host_bytes)[Tier.HOST]
        if sum(state.slots[ref] for ref in below if state.home[ref] is Tier.DISK) > room:
            return found
        return tuple(touch._replace(tier=Tier.HOST) if touch.ref in below else touch for touch in found)

    def decided(
        self, phase: Phase, label: str, touches: Sequence[Touch], held: Collection[PlaneRef], update: Work | None = None
    ) -> Sequence[Action]:
        """Actions for such a moment that are decided on the spot, whatever the plan says. BudgetError: what it needs at once does not fit."""
        stretch = self.stretch
        then: list[Action] = [] if update is None else [Issue(update), Wait(update)]
        budget, slot_bytes = self.budget_bytes(), self.state.slot_bytes
        withheld = stretch.reserve_bytes + self._handicap_bytes + self.spare_bytes
        self.capacity_slots = (budget - withheld) // slot_bytes
        try:
            return [*self._make_room(touches, held, self.capacity_slots), *then]
        except NoRoom as refusal:
            if refusal.tier is not self.state.compute:
                moment = f"{stretch.position} {phase} {label}"
                raise refuse_host(refusal.needed_slots, moment, state=self.state, host_bytes=self.host_bytes) from None
            needed_slots = refusal.needed_slots
        # The reserve is a forecast; what is asked for now is a fact, and stays alone. The meter, where there is one, has the last word.
        need = Need(f"{stretch.position} {phase} {label}", needed_slots, slot_bytes, 0)
        if need.nbytes > budget:
            raise refuse_moment(
                need,
                tier=self.state.compute,
                budget_bytes=budget + self.costs.set_aside_bytes,
                fixed_bytes=self.costs.beside(need.nbytes),
                instead="without views of parameters and of gradients that still pin slots (session.state_dict() reads one tensor at a time, "
                "session.export(dir) writes them as save_pretrained does)",
            )
        self.capacity_slots = needed_slots
        return [*self._make_room(touches, held, needed_slots), *then]

    def _make_room(self, touches: Sequence[Touch], held: Collection[PlaneRef], capacity_slots: int) -> Sequence[Action]:
        state = self.state
        capacity = capacity_of(state, capacity_slots, host_bytes=self.host_bytes)
        waits = [Wait(update) for update in state.updates]
        if waits:
            state = state.copy()
            for wait in waits:
                apply(state, wait)
        return [*waits, *make_room(state, touches=touches, held=held, capacity=capacity, order=self._order())]

    def _order(self) -> Order:
        stretch = self.stretch
        if stretch.trace is not None and stretch.position < len(stretch.trace.moments):
            if self._worth is None:
                self._worth = POLICIES[self.policy](Uses(stretch.trace))
            worth, now = self._worth, stretch.position
            return lambda tier, refs: eviction_order(refs, state=self.state, tier=tier, worth=worth, now=now)
        return lambda _, refs: sorted(refs, key=lambda ref: (self._last_use.get(ref, -1), ref))
