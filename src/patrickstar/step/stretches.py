"""Stretches of a step, in the order of time: what begins and ends when, and who learns of it.

A stretch is planned when it begins, from where every unit is then (`plan/planner.py`). `forwards.py` has what is expected of a forward,
`plan/stretch.py` what becomes of a stretch that is under way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from patrickstar.core.trace import Trace
from patrickstar.errors import BudgetError
from patrickstar.parameters.blocks import Blocks
from patrickstar.parameters.registered import Registered
from patrickstar.plan.planner import Planner
from patrickstar.plan.stretch import Ask, Draft, Stretch, StretchKind
from patrickstar.step.budgets import Budgets
from patrickstar.step.executor import Executor
from patrickstar.step.forwards import KnownForwards
from patrickstar.step.known_forwards import BEING_MEASURED, KnownForward
from patrickstar.step.late_planes import LatePlanes
from patrickstar.step.pending_step import PendingStep
from patrickstar.step.whole import Whole
from patrickstar.tracing.inputs import asks_for_gradients, cache_tensors, can_be_traced
from patrickstar.tracing.live_bytes import TraceRecorder
from patrickstar.units import format_bytes

_log = logging.getLogger("patrickstar")


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Counts of steps that have ended. A step is planned where every stretch of it was.

    Attributes:
        planned, reactive: steps that went as planned, and steps that did not. reason: why the last of these did not.
        reasons: why stretches of the step under way did not. was_planned: whether the last step was.
    """

    planned: int = 0
    reactive: int = 0
    reason: str = ""
    reasons: tuple[str, ...] = ()
    was_planned: bool = False

    @property
    def steps(self) -> int:
        """All of them."""
        return self.planned + self.reactive

    def ended(self, stretch: Stretch, explanation: str) -> StepCounts:
        """The counts after a stretch, as it has gone. `explanation`: of a departure of its."""
        if stretch.kind is StretchKind.EVALUATION or (
            stretch.kind is StretchKind.TRAINING and not stretch.gave_gradients
        ):
            return self  # no part of a step: a forward alone, or a backward for other tensors than parameters
        if stretch.reason:
            reason = stretch.reason + explanation
        elif not stretch.complete:
            reason = f"the {stretch.kind} ended after {stretch.position} ops of its trace"
        else:
            return self
        if stretch.kind is not StretchKind.UPDATE:
            return replace(self, reasons=(*self.reasons, reason))
        if self.was_planned:  # an update in a stretch of its own is part of the step that is counted already
            return replace(self, planned=self.planned - 1, was_planned=False)._with_reactive(reason)
        return self

    def step_ended(self) -> StepCounts:
        """The counts after a step: the optimizer has updated, and all that came since the last update was one step."""
        after = replace(self, reasons=(), was_planned=not self.reasons)
        return after._with_reactive(self.reasons[-1]) if self.reasons else replace(after, planned=after.planned + 1)

    def _with_reactive(self, reason: str) -> StepCounts:
        after = replace(self, reactive=self.reactive + 1, reason=reason)
        _log.info("step %d was not as planned: %s", after.steps, reason)
        return after


@dataclass(kw_only=True, eq=False)
class Stretches:
    """Begins and ends the stretches of a step.

    Attributes:
        planner: makes their plans. budgets: the tiers, what each may hold, and what the allocator does. known: the kinds of forward.
        blocks: whose parameters are ordinary ones while they run. whole: the parameters as long as they keep their bytes.
        late_planes: has room for gradients that must wait.
        whole_chunks: whether a backward updates chunks whole where there is room.
        may_weave: tells whether nobody holds what an update would have to renew.
        counts: of steps that went as planned, or did not. training: the last forward that was recorded, with its backward.
    """

    executor: Executor
    planner: Planner
    budgets: Budgets
    known: KnownForwards
    blocks: Blocks
    whole: Whole
    late_planes: LatePlanes
    whole_chunks: bool
    may_weave: Callable[[], bool]

    counts: StepCounts = field(default_factory=StepCounts, init=False)
    training: Stretch | None = field(default=None, init=False)
    _forwards: int = field(default=0, init=False)  # since the last step
    _forwards_a_step: int = field(default=0, init=False)  # in the one before
    _current: KnownForward | None = field(default=None, init=False)
    _recorded: bool = field(default=False, init=False)

    def begin_forward(self, registered: Registered, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begins the stretch of a forward of the whole model. BudgetError: the forward does not fit. Nothing has changed then."""
        self.end()
        was_whole = not self.whole.why
        known = self.known.expect(registered, args, kwargs)
        recorded = torch.is_grad_enabled()
        self._forwards += recorded
        kind = StretchKind.TRAINING if recorded else StretchKind.EVALUATION
        is_whole = self.whole.stays(known.expected, self.known.reserve_bytes)
        if was_whole and not is_whole:
            self.known.kinds.clear()
            known = self.known.expect(registered, args, kwargs)
        expected, room = known.expected, self.executor.room
        if is_whole:  # nothing has to move, and nobody tells of uses
            draft = None if expected.trace is None else self._forward(kind, expected).draft
            if room.always_meters or (draft is None and self.budgets.bind):
                room.start_meter(acts=True)
            reserve, gradients = self.known.reserve_bytes(), self.whole.gradient_bytes
            stretch = Stretch(kind, draft, reserve_bytes=reserve, gradient_bytes=gradients)
        else:
            self.blocks.bind(known.blocks)
            self.blocks.expect_compilable(registered.modules)
            stretch = (self._forward_with_updates(known) if recorded else None) or self._forward_alone(kind, known)
            needed = room.always_meters or expected.trace is None or expected.measure_next
            # Whoever asks for the inputs' gradients may differentiate these, which only a measured trace can show.
            wanted = recorded and known.measured is None and known.twice is None and asks_for_gradients((args, kwargs))
            if needed or wanted:
                meter = room.start_meter(acts=needed)
                if expected.trace is not None or can_be_traced((args, kwargs)):
                    self.executor.recorder = TraceRecorder(meter)
        self._current, self._recorded = known, False
        self._begin(stretch, cache_tensors(kwargs))
        if not is_whole:
            self.executor.open()
        elif room.meter is None:
            self.executor.store.hold_beside(stretch.reserve_bytes)
        if recorded:
            self.training = stretch

    def _forward_alone(self, kind: StretchKind, known: KnownForward) -> Stretch:
        """The stretch of a forward, before which the updates that are pending are done."""
        expected = known.expected
        self.executor.settle()
        self.end()
        if expected.trace is None:
            return Stretch(kind, reason=expected.reason, reserve_bytes=self.known.reserve_bytes())
        may_wait = kind is StretchKind.TRAINING and self.whole_chunks and expected is known
        stretch = self._forward(kind, expected, whole=may_wait and self._goes_as_expected(known))
        if expected.measure_next:
            stretch.depart(BEING_MEASURED)
        return stretch

    def _forward_with_updates(self, known: KnownForward) -> Stretch | None:
        """The stretch of a forward with the updates that are pending between its moments; None where these are better done before."""
        pending = self.executor.pending
        if pending is None or not self.planner.weaves or len(pending.waiting) < len(pending.trace):
            return None
        if not self._goes_as_expected(known):
            return None
        try:
            stretch = self._forward(StretchKind.TRAINING, known.expected, pending)
        except BudgetError:  # of the host below a device, which has room for one after the other
            return None
        pending.is_woven = True
        return stretch

    def _goes_as_expected(self, known: KnownForward) -> bool:
        """Tells whether updates may have a place between the moments of a forward and its backward."""
        expected = known.expected
        leaves = known.by_chance or expected.measure_next or expected.departures
        return expected.trace is not None and not leaves and self.may_weave()

    def _forward(
        self, kind: StretchKind, expected: KnownForward, pending: PendingStep | None = None, *, whole: bool = False
    ) -> Stretch:
        """The stretch of a forward whose trace is known. `pending`: the updates to be woven into it; `whole`: whether its backward may have some."""
        assert expected.trace is not None, "a forward without a trace has no plan"
        is_trained = kind is StretchKind.TRAINING
        excess = expected.excess_beyond(self.budgets.machine.costs.set_aside_bytes)
        try:
            draft = self._plan(
                kind,
                expected.trace,
                excess_bytes=excess,
                kept_bytes=self.executor.room.kept_bytes if expected.knows_workspaces else None,
                updates=None if pending is None else pending.trace,
                unwanted=frozenset(pending.frees) if pending is not None else frozenset(),
                whole=whole,
                lets_go=expected.let_go(self.executor.store.state) if is_trained else frozenset(),
                lets_go_at=expected.lets_go_at,
            )
        except BudgetError as refusal:
            if not excess or pending is not None or refusal.tier != self.budgets.machine.compute.label:
                raise
            learned = f"{format_bytes(excess)} are in no trace: an earlier step took them; this one has not begun"
            raise BudgetError(f"{refusal}\n  of the activations {learned}", **vars(refusal)) from None
        if draft.whole_chunks is not None:
            self.late_planes.open(draft.whole_chunks.homes, draft.whole_chunks.slots)
        return Stretch(kind, draft)

    def begin_norm(self, trace: Trace) -> Trace:
        """Begins the stretch of the norm of gradients; its moments, each of which reads a gradient on the tier that has it."""
        self.end()
        trace = self.planner.read_where_it_is(trace, self.executor.pilot.nearest)
        self._begin(Stretch(StretchKind.NORM, self._plan(StretchKind.NORM, trace)))
        return trace

    def begin_update(self, pending: PendingStep) -> None:
        """Begins the stretch of what is left of the optimizer's step; in the middle of another stretch, that goes on without its plan."""
        stretch = self.executor.pilot.stretch
        if stretch.kind is StretchKind.TRAINING and not stretch.is_over:
            stretch.depart("the optimizer's step was asked for at once")
            return
        self.end()
        trace = pending.trace
        if len(pending.waiting) < len(trace):
            trace = Trace(tuple(pending.waiting.values()))
        draft = self._plan(StretchKind.UPDATE, trace, unwanted=frozenset(pending.frees))
        self._begin(Stretch(StretchKind.UPDATE, draft))

    def _begin(self, stretch: Stretch, there: Sequence[Tensor] = ()) -> None:
        if stretch.trace is not None:
            self.planner.began(stretch.kind, stretch.trace)
        room = self.executor.room
        room.begin(stretch, sum(tensor.nbytes for tensor in there))
        if room.meter is not None:
            room.meter.note(there)
        self.executor.pilot.begin(stretch)

    def _plan(self, kind: StretchKind, trace: Trace, **expected: Any) -> Draft:
        self.executor.room.rise(trace.peak)
        # Gradients are complete in the last backward before a step, as far as this step is as the last one.
        is_last = kind is StretchKind.TRAINING and self._forwards == self._forwards_a_step
        return self.planner.plan(
            Ask(
                kind=kind,
                trace=trace,
                start=self.executor.store.state,
                level_bytes=self.executor.room.level_bytes,
                taken_bytes=self.known.fitting.taken_bytes(),
                forwards=max(self._forwards, self._forwards_a_step),
                is_last=is_last,
                **expected,
            )
        )

    def forget_plans(self, why: str) -> None:
        """Forgets all plans: units have come or have other sizes. The rest of the stretch is decided on the spot, later ones are planned anew."""
        self.planner.forget()
        self.whole.known_sizes.cache_clear()
        if not self.executor.pilot.stretch.complete:
            self.executor.pilot.stretch.depart(why)

    def end(self) -> None:
        """Ends the stretch that was under way."""
        stretch = self.executor.pilot.stretch
        if stretch.gradient_bytes is not None and stretch.gave_gradients:
            stretch.finish()  # of its backward, as of most gradients, nobody may have been told
        self.executor.wait_for_updates()
        self.executor.room.look()
        recorder, self.executor.recorder = self.executor.recorder, None
        known, self._current = self._current, None
        if known is not None:
            expected = known.expected
            expected.lets_go_at = stretch.own_let_go_at or (0 if stretch.lets_go else expected.lets_go_at)
            if recorder is not None:
                self.known.learn(known, stretch, recorder.trace(), state=self.executor.store.state)
            elif not self._recorded:
                known.learn(stretch, None)
        self.executor.room.stop_meter()
        if stretch.kind is not StretchKind.OUTSIDE:
            budget_bytes = self.budgets.room_bytes(kept_bytes=0) - self.known.fitting.taken_bytes()
            self.executor.room.end(stretch, known, budget_bytes=budget_bytes)
            self.counts = self.counts.ended(stretch, "" if known is None else known.explain(stretch))
        self.executor.pilot.begin(Stretch(StretchKind.OUTSIDE))
        self.late_planes.close()

    def backward_ended(self) -> None:
        """Ends the last moment of a backward call that is over, whatever the user does next."""
        stretch = self.executor.pilot.stretch
        recorder, self.executor.recorder = self.executor.recorder, None
        if recorder is not None and self._current is not None:
            self.known.learn(self._current, stretch, recorder.trace(), state=self.executor.store.state)
            self._recorded = True
        stretch.finish()
        self.executor.room.look()
        self.executor.room.pause_meter()

    def abandon(self) -> None:
        """Abandons a forward or a backward that an exception has ended: what is made from now on is no part of it."""
        self.executor.recorder = None
        self.executor.pilot.stretch.finish()
        self.executor.room.pause_meter()

    def pause(self) -> None:
        """Ends a stretch whose moments have all come: state is read or written between stretches."""
        if self.executor.pilot.stretch.complete:
            self.end()

    def step_ended(self) -> None:
        """Ends a step: the optimizer has updated, and all that came since the last update was one step."""
        self.end()
        self._forwards, self._forwards_a_step = 0, self._forwards
        self.counts = self.counts.step_ended()
