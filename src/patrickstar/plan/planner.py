"""The planner: from what a stretch is expected to do, and where every unit is, to its plan. Pure: no torch, no byte, no clock.

A session asks it when a stretch begins (`step/stretches.py`), and carries the plan out. A forecast asks the same planner, and carries the plan out on
paper (`session/forecast.py`). So what a forecast says is what a session does: whatever is to change plans is a pass of the list below.

Note [Traces that are told apart by identity]
    Plans are kept, and the same question gets the same plan. What is asked about is told apart by identity, which is cheap where equality would
    compare thousands of moments; so a pass gives the very same trace for the same question, and what stands in a key is kept alive beside its answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

from patrickstar.core.fixed_costs import FixedCosts
from patrickstar.core.formats import SessionFormats
from patrickstar.core.layout import Layout
from patrickstar.core.machine import Machine
from patrickstar.core.planes import GRAD, PlaneRef
from patrickstar.core.trace import Touch, Trace
from patrickstar.plan.check import check
from patrickstar.plan.fit import with_kept_bytes, worst_moment
from patrickstar.plan.make import make_plan, must_repeat
from patrickstar.plan.plan import Plan
from patrickstar.plan.residency import Residency, slots_of
from patrickstar.plan.stretch import Ask, Draft, StretchKind
from patrickstar.plan.touches import gradients_freed, norm_trace, on_tiers, step_trace
from patrickstar.plan.update_choice import UpdateChoice, choose_places, choose_tiers
from patrickstar.plan.weave import own_moments, weave
from patrickstar.plan.whole_chunks import update_whole_chunks

_KEPT: Final = 192
SPARE_SHARE: Final = 16
_Answer = TypeVar("_Answer")


class PlanBudgets:
    """The budgets of a session or a forecast, as far as plans are concerned (`Budgets` in `step/budgets.py`)."""

    __slots__ = ()
    machine: Machine
    fixed_bytes: int
    extra_bytes: int

    def room_bytes(self, *, kept_bytes: int | None = None) -> int:
        """Bytes that chunks and activations may take of the compute tier.

        Args:
            kept_bytes: what libraries keep, where what kernels take besides is known and counts among activations; None: a share is left for both.
        """
        compute = self.machine.compute
        return self.machine.budget[compute] if kept_bytes is None else self.machine.given(compute) - kept_bytes

    def machine_for(self, need_bytes: int, *, taken_bytes: int = 0, kept_bytes: int | None = None) -> Machine:
        """The machine to plan a stretch for that needs at least so much of the compute tier.

        Args:
            taken_bytes: what the user has taken of that tier's budget. kept_bytes: as for `room_bytes`.
        """
        compute = self.machine.compute
        budget = self.room_bytes(kept_bytes=kept_bytes) - taken_bytes
        room = max(budget - self.spare_bytes, min(budget, need_bytes))
        costs = self.machine.costs if kept_bytes is None else FixedCosts()
        return Machine(compute, {**self.machine.budget, compute: room}, costs)

    @property
    def spare_bytes(self) -> int:
        """Bytes of the compute tier that are kept free where it can be: `extra_bytes`, but no more than a sixteenth of a small budget."""
        return min(self.extra_bytes, self.machine.budget[self.machine.compute] // SPARE_SHARE)


@dataclass(kw_only=True, eq=False)
class Planner:
    """Plans stretches, and remembers what it has planned and which stretch follows which.

    Attributes:
        policy: of eviction. prefetch: moments by which transfers may be early. choice: where updates are done.
        weaves: whether updates are woven into the next forward. keeps: whether an allocator of a device keeps what activations have had.
        norm_bytes, update_bytes: what the norm, or an update, takes of the tier that computes.
        checks: whether each new plan is held against `plan/check.py`.
        made: is told of each new plan, and its trace. used_below: gradients that updates of the last step have read on the tier below.
    """

    layout: Layout
    formats: SessionFormats
    budgets: PlanBudgets
    policy: str
    prefetch: int | None
    choice: UpdateChoice
    weaves: bool
    keeps: bool
    norm_bytes: int = 0
    update_bytes: int = 0
    checks: bool = False
    made: Callable[[Plan, Trace], object] = lambda *_: None

    _memo: OrderedDict[Hashable, tuple[Any, tuple[object, ...]]] = field(default_factory=OrderedDict, init=False)
    _follower: dict[StretchKind, Trace] = field(default_factory=dict, init=False)
    used_below: frozenset[PlaneRef] = field(default=frozenset(), init=False)

    def plan(self, ask: Ask) -> Draft:
        """The plan of a stretch, by all passes in turn. BudgetError: some moment does not fit."""
        draft = Draft(ask, ask.trace, ask.trace)
        for make_better in PASSES:
            draft = make_better(self, draft)
        return draft

    # what stretches go through that no forward shows

    def norm_trace(self, names: Collection[str]) -> Trace:
        """The trace of the norm of these parameters' gradients."""
        formats = self.formats.now
        make = partial(norm_trace, self.layout, names, formats=formats, scratch_bytes=self.norm_bytes)
        return self.once(("norm", frozenset(names), formats.thawed), make)

    def update_trace(self, names: Collection[str]) -> Trace:
        """The trace of the update of these parameters, where the step computes."""
        formats = self.formats.now
        make = partial(step_trace, self.layout, names, formats=formats, in_plane=True, scratch_bytes=self.update_bytes)
        return self.once(("step", frozenset(names), formats.thawed), make)

    def placed_updates(self, names: Collection[str], start: Residency, *, taken_bytes: int, level_bytes: int) -> Trace:
        """The trace of the update of these parameters, each chunk of them where that is best."""
        updates = self.update_trace(names)
        if not self.weaves and self.choice.tier is None:
            return updates
        machine = self.budgets.machine_for(0, taken_bytes=taken_bytes)
        tiers = choose_tiers(updates, start, machine=machine, peak_bytes=level_bytes, choice=self.choice)
        self.used_below = frozenset(PlaneRef(chunk, GRAD) for chunk in tiers)
        key = ("on tiers", id(updates), frozenset(tiers.items()))
        return self.once(key, partial(on_tiers, updates, tiers), updates) if tiers else updates

    # the order of stretches

    def began(self, kind: StretchKind, trace: Trace) -> None:
        """Notes that a stretch with this trace begins: the next of its kind is expected to have it."""
        self._follower[kind] = trace

    def following(self, kind: StretchKind) -> Trace | None:
        """The trace of the stretch that is expected after one of this kind."""
        match kind:
            case StretchKind.TRAINING | StretchKind.NORM if not self.weaves:
                after = StretchKind.UPDATE
            case StretchKind.TRAINING if StretchKind.NORM in self._follower:
                after = StretchKind.NORM
            case StretchKind.NORM | StretchKind.UPDATE:
                after = StretchKind.TRAINING
            case _:
                after = kind
        return self._follower.get(after)

    # what passes ask

    def once(self, key: Hashable, make: Callable[[], _Answer], *alive: object) -> _Answer:
        """The answer to a question, which is made once. See Note [Traces that are told apart by identity]; `alive`: what stands in the key."""
        if key not in self._memo:
            self._memo[key] = make(), alive
            if len(self._memo) > _KEPT:
                self._memo.popitem(last=False)
        self._memo.move_to_end(key)
        answer: _Answer = self._memo[key][0]
        return answer

    def asked_before(self, asked: Hashable) -> int:
        """The number of plans that have been made for the same stretch, from other states."""
        return sum(key[1] == asked for key in self._memo if isinstance(key, tuple) and key[0] == "plan")

    def forget(self) -> None:
        """Forgets all answers: units have come or have other sizes."""
        self._memo.clear()

    def machine_for(self, ask: Ask, *traces: Trace, start: Residency) -> Machine:
        """The machine to plan a stretch for that goes through these traces."""
        need = max(worst_moment(trace, start=start).nbytes for trace in traces)
        return self.budgets.machine_for(need, taken_bytes=ask.taken_bytes, kept_bytes=ask.kept_bytes)

    def read_where_it_is(self, norm: Trace, nearest: Callable[[tuple[Touch, ...]], tuple[Touch, ...]]) -> Trace:
        """The trace of a norm each of whose moments reads a gradient where that is. `nearest`: gives the touches for that."""
        # From the host a device brings gradients up: its squares take less time than the host's, and nobody waits.
        if not self.weaves or self.keeps:
            return norm
        own = tuple(nearest(moment.touches) for moment in norm.moments)

        def make() -> Trace:
            return Trace(tuple(replace(moment, touches=new) for moment, new in zip(norm.moments, own, strict=True)))

        return self.once(("touches", id(norm), own), make, norm)


# the passes


def allow_excess(planner: Planner, draft: Draft) -> Draft:
    """Leaves room at every moment, up to the level, for what such a stretch has taken more than its trace showed."""
    excess, level = draft.ask.excess_bytes, draft.ask.level_bytes
    if not excess:
        return draft
    trace = draft.trace

    def make() -> Trace:
        seen = [max(one.nonmodel_bytes, min(level, one.nonmodel_bytes + excess)) for one in trace.moments]
        return Trace(tuple(map(lambda one, nbytes: replace(one, nonmodel_bytes=nbytes), trace.moments, seen)))

    raised = planner.once(("excess", id(trace), level, excess), make, trace)
    return replace(draft, trace=raised, foreseen=raised)


def allocator_keeps(planner: Planner, draft: Draft) -> Draft:
    """Leaves at every moment what an allocator of a device keeps of activations that were there at others."""
    if not planner.keeps:
        return draft
    ask, trace = draft.ask, draft.trace
    budget = planner.budgets.room_bytes(kept_bytes=ask.kept_bytes) - ask.taken_bytes
    make = partial(with_kept_bytes, trace, kept_bytes=ask.level_bytes, budget_bytes=budget, start=draft.start)
    return replace(draft, trace=planner.once(("kept", id(trace), ask.level_bytes, budget), make, trace))


def place_updates(planner: Planner, draft: Draft) -> Draft:
    """Puts updates between the moments: those that are pending, each before what needs it, or those of chunks that a backward updates whole."""
    ask, trace, at = draft.ask, draft.trace, draft.ask.lets_go_at
    if ask.updates is not None:
        updates, state, budgets = ask.updates, ask.start, planner.budgets
        capacity = planner.machine_for(ask, ask.trace, updates, start=state).budget[state.compute]
        woven = planner.once(
            ("woven", id(trace), id(updates), capacity),
            lambda: weave(trace, updates, state=state, capacity_bytes=capacity, kept_bytes=budgets.fixed_bytes),
            trace,
            updates,
        )
        at = own_moments(woven)[at - 1] + 1 if at else 0
        draft = allocator_keeps(planner, replace(draft, trace=woven, foreseen=woven))
    # Nobody wants gradients once an update has read them, nor, from before a moment on, what is expected to be let go of.
    unwanted, lets_go = frozenset(ask.unwanted), frozenset(ask.lets_go).difference(ask.unwanted)
    read_last = [one for one in gradients_freed(draft.trace) if one[1] in unwanted] if unwanted else []
    gone = [(at - 1, ref) for ref in sorted(lets_go)]
    draft = replace(draft, frees=(*read_last, *gone), lets_go=lets_go, lets_go_at=at)
    if not ask.whole:
        return draft
    capacity = planner.machine_for(ask, ask.trace, start=ask.start).budget[ask.start.compute]
    found = planner.once(
        ("whole", id(trace), capacity, ask.level_bytes),
        lambda: update_whole_chunks(
            trace,
            state=ask.start,
            slots_of_gradient=lambda chunk: slots_of(PlaneRef(chunk, GRAD), planner.layout, planner.formats.now),
            capacity_bytes=capacity,
            choose_places=partial(
                choose_places,
                machine=planner.budgets.machine_for(0, taken_bytes=ask.taken_bytes),
                peak_bytes=ask.level_bytes,
                choice=planner.choice,
            ),
        ),
        trace,
    )
    if found is None:
        return draft
    frees = (*draft.frees, *found.frees)
    whole = replace(draft, trace=found.trace, foreseen=found.trace, frees=frees, whole_chunks=found)
    return allocator_keeps(planner, whole)


def make(planner: Planner, draft: Draft) -> Draft:
    """Makes the plan: moment by moment, what must leave so that the moment fits, and what must come."""
    ask, trace, start = draft.ask, draft.trace, draft.ask.start
    # Gradients that updates read on the tier below are complete in the last backward before a step.
    after, goes_down = planner.following(ask.kind), planner.used_below if ask.is_last else frozenset[PlaneRef]()
    asked = (ask.kind, id(trace), id(after), ask.taken_bytes, draft.frees, goes_down, ask.kept_bytes)
    contents = tuple(map(frozenset, (start.newest.items(), *start.taken.values(), start.in_flight.items())))

    def make_now() -> Plan:
        plan = make_plan(
            trace,
            layout=planner.layout,
            machine=planner.machine_for(ask, trace, start=draft.start),
            start=draft.start,
            policy=planner.policy,
            following=after,
            frees=draft.frees,
            prefetch=planner.prefetch,
            goes_down=goes_down,
            # Each forward of a step begins elsewhere.
            repeats=must_repeat(planner.asked_before(asked) // max(ask.forwards, 1), trace=trace, following=after),
        )
        if planner.checks and (found := check(plan, trace, planner.layout, plan.machine)):
            raise AssertionError(f"the plan of the {ask.kind} is wrong, a mistake of ours: " + "; ".join(found))
        planner.made(plan, trace)
        return plan

    return replace(draft, plan=planner.once(("plan", asked, contents), make_now, trace, after))


PASSES: Final = (allow_excess, allocator_keeps, place_updates, make)
"""The way from a trace to a plan, in order. Each gives another draft and changes nothing."""
