"""A run on paper: the steps of an ordinary loop, planned by the planner of a session, and carried out by simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from patrickstar.core.machine import Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, REST, PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.errors import BudgetError
from patrickstar.plan import residency
from patrickstar.plan.pilot import Pilot
from patrickstar.plan.plan import Plan
from patrickstar.plan.planner import Planner
from patrickstar.plan.residency import Residency
from patrickstar.plan.simulate import Simulation, simulate
from patrickstar.plan.stretch import Ask, Draft, StretchKind
from patrickstar.plan.touches import kept_gradients, master_touches
from patrickstar.step.budgets import Budgets

_STEPS_TO_SETTLE = 12


@dataclass(slots=True)
class PaperStep:
    """One step: its plans in order, with the trace of each, and the bytes that it moves by link."""

    plans: list[Plan] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    moved: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False, kw_only=True)
class PaperRun:
    """Steps of `forward, backward, clip where that is wanted, optimizer.step(), zero_grad()`, none of which departs from its trace.

    Attributes:
        state: where everything rests, at first before `manage` fills in the weights. forward: the trace of a forward and its backward.
        clips: whether the norm of the gradients is taken. in_backward: whether parameters are updated as gradients arrive.
        gradient_bytes: where parameters keep their bytes, what gradients take beside chunks and what the trace has; None: they are bound by use.
        peak: bytes by tier, of all steps so far. ran: all stretches, with their traces.
        trained: the parameters that the optimizer updates; in a backward, those that wait for its end.
    """

    planner: Planner
    state: Residency
    budgets: Budgets
    forward: Trace
    clips: bool
    in_backward: bool
    gradient_bytes: int | None

    peak: Counter[str] = field(default_factory=Counter)
    ran: list[tuple[Simulation, Trace]] = field(default_factory=list)
    trained: frozenset[str] = field(init=False)
    _level_bytes: int = 0
    _pilot: Pilot = field(init=False)
    _pending: Trace | None = None
    _done: int = 0

    def __post_init__(self) -> None:
        budget, spare = self.budgets.machine.budget, self.budgets.spare_bytes
        compute, host, policy = budget[self.state.compute], budget.get(Tier.HOST, 0), self.planner.policy
        self._pilot = Pilot(self.state, budget_bytes=lambda: compute, host_bytes=host, spare_bytes=spare, policy=policy)
        self.trained = kept_gradients(self.forward, self.planner.layout)
        self._level_bytes = max(self.budgets.passes.update, self.forward.peak)

    def settle(self) -> tuple[PaperStep, PaperStep]:
        """The first step, and the one that repeats itself, once steps do."""
        self._fill()
        first = last = self.step()
        starts = [str(self.state.snapshot())]
        for _ in range(_STEPS_TO_SETTLE - 1):
            last = self.step()
            now = str(self.state.snapshot())
            if now in starts:
                break
            starts.append(now)
        return first, last

    def step(self) -> PaperStep:
        """One step. BudgetError: some moment of it does not fit."""
        step = PaperStep()
        if self.gradient_bytes is not None:
            self._step_whole(step, self.gradient_bytes)
            return step
        self._forward(step)
        if self.clips:
            self._norm(step)
        self._update(step)
        self._done += 1
        return step

    def _step_whole(self, step: PaperStep, gradient_bytes: int) -> None:
        """A step in which nothing moves (Note [Whole] in the binding): gradients are tensors, the optimizer's step is no stretch."""
        layout = self.planner.layout
        for name in layout.slices:
            self._use(name, [Touch(ref) for ref in layout.weight_units(name)])
        start, tier = self.state, self.state.compute.label
        peak = self.peak[tier]
        draft = self._plan(StretchKind.TRAINING, self.forward)
        self._carry_out(draft, step)
        self.state = self._pilot.state = start
        self.peak[tier] = peak  # whose gradients are in slots
        self._note_peak(draft.trace.peak + gradient_bytes)
        chunks = {part.chunk for name in self.trained for part in layout.parts(name)}
        chunks |= {ref.chunk for ref in self.forward.touched(EXP_AVG)}  # of those that are updated in the backward
        for chunk in sorted(chunks):
            self._use("", [Touch(PlaneRef(chunk, plane), True) for plane in (EXP_AVG, EXP_AVG_SQ)])
        self._note_peak(gradient_bytes)

    def _note_peak(self, beside_bytes: int) -> None:
        tier = self.state.compute
        taken = self.state.slots_used[tier] * self.state.slot_bytes + beside_bytes
        self.peak[tier.label] = max(self.peak[tier.label], taken)

    def _forward(self, step: PaperStep) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                draft = self._plan(StretchKind.TRAINING, self.forward, updates=pending, unwanted=self._gradients())
            except BudgetError:  # of the host below a device, which has room for one after the other
                self._update_apart(pending, step)
            else:
                self._carry_out(draft, step)
                return
        draft = self._plan(StretchKind.TRAINING, self.forward, whole=self.in_backward and not self.planner.choice.apart)
        self._carry_out(draft, step)
        if draft.whole_chunks is not None:
            self._let_gradients_go(keeps=True)
            self.state.shrink(sorted(ref for ref in draft.whole_chunks.homes if self.state.is_free(ref)))

    def _norm(self, step: PaperStep) -> None:
        trace = self.planner.read_where_it_is(self.planner.norm_trace(self.trained), self._pilot.nearest)
        self._carry_out(self._plan(StretchKind.NORM, trace), step)

    def _update(self, step: PaperStep) -> None:
        if self.in_backward:
            if self.trained:
                self._carry_out(self._plan(StretchKind.UPDATE, self.planner.update_trace(self.trained)), step)
            self._let_gradients_go(keeps=False)
            return
        level = self._level_bytes
        update = self.planner.placed_updates(self.trained, self.state, taken_bytes=0, level_bytes=level)
        if self.planner.weaves:
            self._pending = update
        else:
            self._update_apart(update, step)

    def _update_apart(self, update: Trace, step: PaperStep) -> None:
        self._carry_out(self._plan(StretchKind.UPDATE, update, unwanted=self._gradients()), step)
        self._let_gradients_go(keeps=False)

    def _plan(self, kind: StretchKind, trace: Trace, **expected: Any) -> Draft:
        if self.planner.keeps:
            self._level_bytes = max(self._level_bytes, trace.peak)
        is_last = kind is StretchKind.TRAINING and self._done > 0
        level = self._level_bytes
        return self.planner.plan(
            Ask(kind=kind, trace=trace, start=self.state, level_bytes=level, is_last=is_last, **expected)
        )

    def _carry_out(self, draft: Draft, step: PaperStep) -> None:
        plan, trace = draft.plan, draft.trace
        assert plan is not None, "no pass has made a plan"
        self.planner.began(draft.ask.kind, trace)
        simulated = simulate(plan, trace)
        self.ran.append((simulated, trace))
        for tier, nbytes in simulated.peak.items():
            self.peak[tier] = max(self.peak[tier], nbytes)
        step.plans.append(plan)
        step.traces.append(trace)
        step.moved.update(simulated.moved)
        self.state = self._pilot.state = Residency.of(plan.end)

    def _gradients(self) -> frozenset[PlaneRef]:
        """The gradients that have contents: all that `zero_grad()` lets go of once they have been used."""
        return frozenset(ref for ref in self.state.home if ref.plane == GRAD and not self.state.is_free(ref))

    def _fill(self) -> None:
        """Values are put into chunks as `manage` does it: parameter by parameter, a piece of each master at a time."""
        layout = self.planner.layout
        for name in layout.slices:
            for part in layout.parts(name):
                is_split = PlaneRef(part.chunk, REST) in self.state.home
                self._use(name, self._pilot.nearest(master_touches(part, layout, is_split=is_split, writes=True)))

    def _use(self, name: str, touches: Sequence[Touch]) -> None:
        """Has units used in a moment that is decided on the spot."""
        assert self._pilot.planned(Phase.STEP, touches, ()) is None, "there is no plan yet"
        for action in self._pilot.decided(Phase.STEP, name, touches, ()):
            residency.apply(self.state, action)
        residency.mark_moment(self.state, Moment(Phase.STEP, name, tuple(touches)))

    def _let_gradients_go(self, *, keeps: bool) -> None:
        """Gradients that nobody wants give their slots back. `keeps`: whether the step goes on, which wants those that have contents."""
        state = self.state
        for ref in sorted(state.home):
            if ref.plane == GRAD and (ref in state.stale[state.compute] if state.is_free(ref) else not keeps):
                for action in residency.release(state, ref):
                    residency.apply(state, action)
