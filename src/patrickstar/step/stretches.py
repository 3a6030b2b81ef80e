"""Stretches of a step, in the order of time: what begins and ends when, and who learns of it.

A stretch is planned when it begins, from where every unit is then (`plan/planner.py`). `forwards.py` has what is expected of a forward,
`plan/stretch.py` what becomes of a stretch that is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar.core.machine import Tier
from patrickstar.core.trace import Trace
from patrickstar.errors import BudgetError
from patrickstar.parameters.blocks import Blocks
from patrickstar.parameters.registered import Registered
from patrickstar.plan.planner import Planner
from patrickstar.plan.recorder import TraceRecorder
from patrickstar.plan.stretch import Ask, Draft, Stretch, StretchKind
from patrickstar.step.budgets import Budgets
from patrickstar.step.executor import Executor
from patrickstar.step.fitting_blocks import FittingBlocks
from patrickstar.step.forwards import KnownForwards
from patrickstar.step.known_forwards import BEING_MEASURED, KnownForward
from patrickstar.step.late_planes import LatePlanes
from patrickstar.step.pending_step import PendingStep
from patrickstar.step.step_counts import StepCounts
from patrickstar.step.whole import Whole
from patrickstar.tracing.signature import asks_for_gradients, can_be_traced
from patrickstar.units import format_bytes

_UNKNOWN_SHARE = 4


class Stretches:
    """Begins and ends the stretches of a step.

    Args:
        planner: makes their plans. fitting: makes forecasts. budgets: the tiers, what each may hold, and what the allocator does.
        taken_bytes: what of the compute tier's budget the user has taken (gradients assigned as `p.grad`, views of those in chunks).
        late_planes: has room for gradients that must wait.
        whole_chunks: whether a backward updates chunks whole where there is room.
        may_weave: whether nobody holds what an update would have to renew. whole: the parameters as long as they keep their bytes.

    Attributes:
        known: the kinds of forward. blocks: whose parameters are ordinary ones while they run. counts: of steps that went as planned, or did not.
        training: the last forward that was recorded, with its backward.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        planner: Planner,
        budgets: Budgets,
        fitting: FittingBlocks,
        blocks: Blocks,
        taken_bytes: Callable[[], int],
        late_planes: LatePlanes,
        whole_chunks: bool,
        may_weave: Callable[[], bool],
        whole: Whole,
    ) -> None:
        self._executor = executor
        self._planner = planner
        self._budgets = budgets
        self._room = executor.room
        self._taken_bytes = taken_bytes
        self._late_planes = late_planes
        self.known = KnownForwards(
            fitting,
            budgets,
            late_planes,
            executor.room,
            taken_bytes,
            is_whole=lambda: not whole.why,
            reserve_bytes=self._reserve_bytes,
        )
        self.counts = StepCounts()
        self._whole_chunks = whole_chunks
        self._may_weave = may_weave
        self._whole = whole
        self.blocks = blocks

        self._forwards = self._forwards_a_step = 0  # since the last step, and in the one before
        self._current: KnownForward | None = None
        self._recorded = False
        self.training: Stretch | None = None

    # forwards

    def begin_forward(
        self,
        registered: Registered,
        named: Mapping[str, nn.Parameter],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Begins the stretch of a forward of the whole model.

        Raises:
            BudgetError: the forward does not fit. Nothing has changed then.
        """
        self.end()
        was_whole = not self._whole.why
        known = self.known.expect(registered, named, args, kwargs)
        recorded = torch.is_grad_enabled()
        self._forwards += recorded
        kind = StretchKind.TRAINING if recorded else StretchKind.EVALUATION
        if self._whole.stays(known.expected, self._reserve_bytes):
            self._begin_unseen(kind, known)
            return
        if was_whole:
            self.known.kinds.clear()
            known = self.known.expect(registered, named, args, kwargs)
        expected = known.expected
        self.blocks.bind(known.blocks)
        self.blocks.expect_compilable(registered.modules)
        stretch = (self._forward_with_updates(known) if recorded else None) or self._forward_alone(kind, known)
        needed = self._room.always_meters or expected.trace is None or expected.measure_next
        # Whoever asks for the inputs' gradients may differentiate these, which only a measured trace can show.
        wanted = recorded and known.measured is None and known.twice is None and asks_for_gradients((args, kwargs))
        if needed or wanted:
            meter = self._room.start_meter(acts=needed)
            if expected.trace is not None or can_be_traced((args, kwargs)):
                self._executor.recorder = TraceRecorder(meter)
        self._current, self._recorded = known, False
        self._begin(stretch)
        self._executor.open()
        if recorded:
            self.training = stretch

    def _begin_unseen(self, kind: StretchKind, known: KnownForward) -> None:
        """Begins the stretch of a forward whose parameters are ordinary: nothing has to move for it, and nobody tells of their uses."""
        draft = None if known.expected.trace is None else self._forward(kind, known.expected).draft
        if self._room.always_meters or (draft is None and self._budgets.bind):
            self._room.start_meter(acts=True)
        reserve, gradients = self._reserve_bytes(), self._whole.gradient_bytes
        stretch = Stretch(kind, draft, reserve_bytes=reserve, gradient_bytes=gradients)
        self._current = known
        self._begin(stretch)
        if self._room.meter is None:
            self._executor.store.hold_beside(stretch.reserve_bytes)
        if kind is StretchKind.TRAINING:
            self.training = stretch

    def _forward_alone(self, kind: StretchKind, known: KnownForward) -> Stretch:
        """The stretch of a forward, before which the updates that are pending are done."""
        expected = known.expected
        self._executor.settle()
        self.end()
        if expected.trace is None:
            return Stretch(kind, reason=expected.reason, reserve_bytes=self._reserve_bytes())
        may_wait = kind is StretchKind.TRAINING and self._whole_chunks and expected is known
        stretch = self._forward(kind, expected, whole=may_wait and self._goes_as_expected(known))
        if expected.measure_next:
            stretch.depart(BEING_MEASURED)
        return stretch

    def _reserve_bytes(self) -> int:
        """Bytes that are left to a forward of which nothing is known: what any has taken, or a share of the budget where none is known."""
        is_unknown = self._room.level_bytes <= self._budgets.passes.update
        unknown = (self._budgets.room_bytes() - self._taken_bytes()) // _UNKNOWN_SHARE if is_unknown else 0
        return max(self._room.level_bytes, unknown)

    def _forward_with_updates(self, known: KnownForward) -> Stretch | None:
        """The stretch of a forward with the updates that are pending between its moments; None where these are better done before."""
        pending = self._executor.pending
        if pending is None or not self._planner.weaves or len(pending.waiting) < len(pending.trace):
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
        return expected.trace is not None and not leaves and self._may_weave()

    def _forward(
        self, kind: StretchKind, expected: KnownForward, pending: PendingStep | None = None, *, whole: bool = False
    ) -> Stretch:
        """The stretch of a forward whose trace is known. `pending`: the updates to be woven into it; `whole`: whether its backward may have some."""
        assert expected.trace is not None, "a forward without a trace has no plan"
        is_trained = kind is StretchKind.TRAINING
        excess = expected.excess_beyond(self._budgets.machine.costs.set_aside_bytes)
        try:
            draft = self._plan(
                kind,
                expected.trace,
                excess_bytes=excess,
                knows_workspaces=expected.knows_workspaces,
                updates=None if pending is None else pending.trace,
                unwanted=frozenset(pending.frees) if pending is not None else frozenset(),
                whole=whole,
                lets_go=expected.let_go(self._executor.store.state) if is_trained else frozenset(),
                lets_go_at=expected.lets_go_at,
            )
        except BudgetError as refusal:
            if not excess or pending is not None or refusal.tier != self._budgets.machine.compute.label:
                raise
            learned = f"{format_bytes(excess)} are in no trace: an earlier step took them; this one has not begun"
            raise BudgetError(f"{refusal}\n  of the activations {learned}", **vars(refusal)) from None
        if draft.whole_chunks is not None:
            self._late_planes.open(draft.whole_chunks.homes, draft.whole_chunks.slots)
        return Stretch(kind, draft)

    def tiers_of(self, updates: Trace) -> Mapping[int, Tier]:
        """The tiers, by chunk, of updates that are best not done where the step computes."""
        state, taken = self._executor.store.state, self._taken_bytes()
        return self._planner.tiers(updates, state, taken_bytes=taken, level_bytes=self._room.level_bytes)

    # any stretch

    def begin_norm(self, trace: Trace) -> Trace:
        """Begins the stretch of the norm of gradients; its moments, each of which reads a gradient on the tier that has it."""
        self.end()
        trace = self._planner.read_where_it_is(trace, self._executor.pilot.nearest)
        self._begin(Stretch(StretchKind.NORM, self._plan(StretchKind.NORM, trace)))
        return trace

    def begin_update(self, pending: PendingStep) -> None:
        """Begins the stretch of what is left of the optimizer's step; in the middle of another stretch, that goes on without its plan."""
        stretch = self._executor.pilot.stretch
        if stretch.kind is StretchKind.TRAINING and not stretch.is_over:
            stretch.depart("the optimizer's step was asked for at once")
            return
        self.end()
        trace = pending.trace
        if len(pending.waiting) < len(trace):
            trace = Trace(tuple(pending.waiting.values()))
        draft = self._plan(StretchKind.UPDATE, trace, unwanted=frozenset(pending.frees))
        self._begin(Stretch(StretchKind.UPDATE, draft))

    def _begin(self, stretch: Stretch) -> None:
        if stretch.trace is not None:
            self._planner.began(stretch.kind, stretch.trace)
        self._room.begin(stretch)
        self._executor.pilot.begin(stretch)

    def _plan(self, kind: StretchKind, trace: Trace, **expected: Any) -> Draft:
        self._room.rise(trace.peak)
        # Gradients are complete in the last backward before a step, as far as this step is as the last one.
        is_last = kind is StretchKind.TRAINING and self._forwards == self._forwards_a_step
        return self._planner.plan(
            Ask(
                kind=kind,
                trace=trace,
                start=self._executor.store.state,
                level_bytes=self._room.level_bytes,
                taken_bytes=self._taken_bytes(),
                forwards=max(self._forwards, self._forwards_a_step),
                is_last=is_last,
                **expected,
            )
        )

    def end_update(self) -> bool:
        """Ends the stretch of the optimizer's step, if that has one of its own; tells whether it has."""
        is_apart = self._executor.pilot.stretch.kind is StretchKind.UPDATE
        if is_apart:
            self.end()
        return is_apart

    def forget_plans(self, why: str) -> None:
        """Forgets all plans: units have come or have other sizes. The rest of the stretch is decided on the spot, later ones are planned anew."""
        self._planner.forget()
        self._whole.sizes_changed()
        if not self._executor.pilot.stretch.complete:
            self._executor.pilot.stretch.depart(why)

    def end(self) -> None:
        """Ends the stretch that was under way."""
        stretch = self._executor.pilot.stretch
        if stretch.gradient_bytes is not None and stretch.gave_gradients:
            stretch.finish()  # of its backward, as of most gradients, nobody may have been told
        self._executor.wait_for_updates()
        self._room.look()
        recorder, self._executor.recorder = self._executor.recorder, None
        known, self._current = self._current, None
        if known is not None:
            expected = known.expected
            expected.lets_go_at = stretch.own_let_go_at or (0 if stretch.lets_go else expected.lets_go_at)
            if recorder is not None:
                self.known.learn(known, stretch, recorder.trace(), state=self._executor.store.state)
            elif not self._recorded:
                known.learn(stretch, None)
        self._room.stop_meter()
        if stretch.kind is not StretchKind.OUTSIDE:
            budget_bytes = self._budgets.room_bytes(knows_workspaces=True) - self._taken_bytes()
            self._room.end(stretch, known, budget_bytes=budget_bytes)
            self.counts = self.counts.ended(stretch, "" if known is None else known.explain(stretch))
        self._executor.pilot.begin(Stretch(StretchKind.OUTSIDE))
        self._late_planes.close()

    def backward_ended(self) -> None:
        """Ends the last moment of a backward call that is over, whatever the user does next."""
        stretch = self._executor.pilot.stretch
        recorder, self._executor.recorder = self._executor.recorder, None
        if recorder is not None and self._current is not None:
            self.known.learn(self._current, stretch, recorder.trace(), state=self._executor.store.state)
            self._recorded = True
        stretch.finish()
        self._room.look()
        self._room.pause_meter()

    def abandon(self) -> None:
        """Abandons a forward or a backward that an exception has ended: what is made from now on is no part of it."""
        self._executor.recorder = None
        self._executor.pilot.stretch.finish()
        self._room.pause_meter()

    def pause(self) -> None:
        """Ends a stretch whose moments have all come: state is read or written between stretches."""
        if self._executor.pilot.stretch.complete:
            self.end()

    def step_ended(self) -> None:
        """Ends a step: the optimizer has updated, and all that came since the last update was one step."""
        self.end()
        self._forwards, self._forwards_a_step = 0, self._forwards
        self.counts = self.counts.step_ended()
