"""Stretches of a step: the plan of each, and what is known of each kind of forward.

A stretch is planned when it begins, from where every unit is then (`plan/planner.py`). Here is the order of time: what begins and ends when, what is
expected of a forward, and what a stretch has shown when it is over.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar.core.machine import Tier
from patrickstar.core.planes import GRAD, PlaneRef
from patrickstar.core.trace import Phase, Trace
from patrickstar.errors import BudgetError
from patrickstar.plan.fit import expect_room, within, worst_moment
from patrickstar.plan.pilot import Planned, Reactive, Stretch, StretchKind
from patrickstar.plan.planner import Ask, Draft, Planner
from patrickstar.plan.recorder import TraceRecorder
from patrickstar.step.budgets import Budgets, with_retention
from patrickstar.step.device_level import DeviceLevel, refused_as_learned
from patrickstar.step.device_peak import DevicePeak
from patrickstar.step.executor import Executor
from patrickstar.step.freed_blocks import FreedBlocks
from patrickstar.step.known_forwards import BEING_MEASURED, KnownForward, like_a_larger_one
from patrickstar.step.late_planes import LatePlanes
from patrickstar.step.metering import Metering
from patrickstar.step.pending_step import PendingStep
from patrickstar.tracing.offline import CannotTrace, OfflineTracer
from patrickstar.tracing.signature import Signature, asks_for_gradients, can_be_traced, signature
from patrickstar.units import format_bytes

__all__ = ["Stretches"]

_KEPT_KINDS = 64
_KEPT_PLANS = 64
_UNKNOWN_SHARE = 4
_UNTRACEABLE = "the forward cannot be traced: {}"
_log = logging.getLogger("patrickstar")


class Stretches:
    """Begins and ends the stretches of a step.

    Args:
        planner: makes their plans. budgets: the tiers, what each may hold, and what the allocator does.
        freed_blocks: learns of stretches that are not planned.
        taken_bytes: what of the compute tier's budget the user has taken (gradients assigned as `p.grad`, views of those in chunks).
        metering: counts live bytes. late_planes: has room for gradients that must wait.
        always_meter: whether every forward is metered (where the budget is a bound on an emulated arena).
        device_peak: what the allocator of a device has given out, where there is one that keeps it.
        whole_chunks: whether a backward updates chunks whole where there is room.
        may_weave: whether nobody holds what an update would have to renew.

    Attributes:
        planned_steps, reactive_steps, reason: steps that went as planned, steps that did not, and why the last of these did not.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        planner: Planner,
        budgets: Budgets,
        freed_blocks: FreedBlocks,
        tracer: OfflineTracer,
        taken_bytes: Callable[[], int],
        metering: Metering,
        late_planes: LatePlanes,
        always_meter: bool,
        device_peak: DevicePeak | None,
        whole_chunks: bool,
        may_weave: Callable[[], bool],
    ) -> None:
        self._executor = executor
        self._planner = planner
        self._budgets = budgets
        self._freed_blocks = freed_blocks
        self._tracer = tracer
        self._taken_bytes = taken_bytes
        self._metering = metering
        self._late_planes = late_planes
        self._always_meter = always_meter
        self._level = DeviceLevel(
            device_peak, least_bytes=budgets.passes.update, set_aside_bytes=budgets.machine.costs.set_aside_bytes
        )
        self._whole_chunks = whole_chunks
        self._may_weave = may_weave

        self._known: OrderedDict[Signature, KnownForward] = OrderedDict()
        self._forwards = self._forwards_a_step = 0  # since the last step, and in the one before
        self._current: KnownForward | None = None
        self._recorded = False
        self._ended: Stretch | None = None
        self._step_reasons: list[str] = []
        self._was_planned = False
        self.planned_steps = 0
        self.reactive_steps = 0
        self.reason = ""
        self.training: Stretch | None = None

    # forwards

    def begin_forward(
        self, model: nn.Module, named: Mapping[str, nn.Parameter], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Begins the stretch of a forward of the whole model.

        Raises:
            BudgetError: the forward does not fit. Nothing has changed then.
        """
        self.end()
        known = self._explore(model, named, args, kwargs)
        expected = known.expected
        recorded = torch.is_grad_enabled()
        self._forwards += recorded
        kind = StretchKind.TRAINING if recorded else StretchKind.EVALUATION
        stretch = (self._forward_with_updates(known) if recorded else None) or self._forward_alone(kind, known)
        needed = self._always_meter or expected.trace is None or expected.measure_next
        # Whoever asks for the inputs' gradients may differentiate these, which only a measured trace can show.
        wanted = recorded and known.measured is None and known.twice is None and asks_for_gradients((args, kwargs))
        if needed or wanted:
            meter = self._metering.start(acts=needed)
            if expected.trace is not None or can_be_traced((args, kwargs)):
                self._executor.recorder = TraceRecorder(meter)
        self._current, self._recorded = known, False
        self._begin(stretch)
        self._executor.open()
        if recorded:
            self.training = stretch

    def _forward_alone(self, kind: StretchKind, known: KnownForward) -> Stretch:
        """The stretch of a forward, before which the updates that are pending are done."""
        expected = known.expected
        self._executor.settle()
        self.end()
        if expected.trace is None:
            unknown = self._budget_bytes(knows_workspaces=False) // _UNKNOWN_SHARE if self._level.is_unknown else 0
            reserve = max(self._level.nbytes, unknown)
            return Stretch(kind, course=Reactive(expected.reason), reserve_bytes=reserve)
        may_wait = kind is StretchKind.TRAINING and self._whole_chunks and expected is known
        stretch = self._forward(kind, expected, whole=may_wait and self._goes_as_expected(known))
        if expected.measure_next:
            stretch.depart(BEING_MEASURED)
        return stretch

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
        excess = self._level.excess_of(expected)
        try:
            draft = self._plan(
                kind,
                expected.trace,
                excess_bytes=excess,
                knows_workspaces=expected.knows_workspaces,
                updates=None if pending is None else pending.trace,
                unwanted=frozenset(pending.frees) if pending is not None else frozenset(),
                whole=whole,
                lets_go=self._let_go(expected) if kind is StretchKind.TRAINING else frozenset(),
                lets_go_at=expected.lets_go_at,
            )
        except BudgetError as refusal:
            if not excess or pending is not None or refusal.tier != self._budgets.machine.compute.label:
                raise
            raise refused_as_learned(refusal, excess) from None
        if draft.whole_chunks is not None:
            self._late_planes.open(draft.whole_chunks.homes, draft.whole_chunks.slots)
        stretch = self._planned(draft)
        stretch.lets_go, stretch.lets_go_at, stretch.own_trace = set(draft.lets_go), draft.lets_go_at, expected.trace
        stretch.whole = draft.whole_chunks
        return stretch

    def tiers_of(self, updates: Trace) -> Mapping[int, Tier]:
        """The tiers, by chunk, of updates that are best not done where the step computes."""
        state, taken = self._executor.store.state, self._taken_bytes()
        return self._planner.tiers(updates, state, taken_bytes=taken, level_bytes=self._level.nbytes)

    def _let_go(self, known: KnownForward) -> frozenset[PlaneRef]:
        """The gradients that will be let go of in the middle of a forward and its backward, if these go as the last time."""
        state = self._executor.store.state
        if known.trace is None or not 0 < known.lets_go_at < len(known.trace.moments):
            return frozenset()
        return frozenset(ref for ref in state.home if ref.plane == GRAD and not state.is_free(ref))

    def _explore(
        self, model: nn.Module, named: Mapping[str, nn.Parameter], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> KnownForward:
        if not can_be_traced((args, kwargs)):
            unknown = KnownForward(reason=_UNTRACEABLE.format("a fake-tensor trace could change its inputs"))
            self._reserve(unknown)
            return unknown
        key = signature(model, args, kwargs)
        known = self._known.get(key)
        if known is None:
            known = like_a_larger_one(key, self._known)
        if key not in self._known and known.trace is None:
            try:
                foreseen = self._tracer.foresee(model, named, args, kwargs)
            except CannotTrace as problem:
                known.reason = _UNTRACEABLE.format(problem)
                _log.info("no trace for this forward (%s): it runs unplanned once and is measured", problem)
            else:
                known.trace = known.offline = with_retention(foreseen.trace, self._budgets)
                known.by_chance = foreseen.by_chance
                start = self._late_planes.with_room_for(known.trace)
                need = worst_moment(known.trace, start=start, trained=torch.is_grad_enabled())
                expect_room(need, self._budgets.machine_for(need.nbytes, taken_bytes=self._taken_bytes()))
        # Refused before it is remembered: a smaller batch may come next, or the same one with more room.
        self._reserve(known.expected)
        self._known[key] = known
        self._known.move_to_end(key)
        if len(self._known) > _KEPT_KINDS:
            self._known.popitem(last=False)
        if known.trace is not None:
            self._level.rise(known.trace.peak)
        return known

    def _reserve(self, known: KnownForward) -> None:
        """Makes room for the gradients that a backward of this forward keeps. See Note [Homes of gradients]."""
        if not torch.is_grad_enabled():
            return
        if known.trace is None:
            self._late_planes.reserve_all(known.reason)
        elif known.reserved is not known.trace:
            self._late_planes.reserve(known.trace)
            known.reserved = known.trace

    # any stretch

    def begin_norm(self, trace: Trace) -> Trace:
        """Begins the stretch of the norm of gradients; its moments, each of which reads a gradient on the tier that has it."""
        self.end()
        # From the host a device brings gradients up: its squares take less time than the host's, and nobody waits.
        if self._planner.weaves and self._budgets.stream_device is None:
            nearest = self._executor.pilot.nearest
            trace = self._planner.with_touches(trace, (nearest(moment.touches) for moment in trace.moments))
        self._begin(self._planned(self._plan(StretchKind.NORM, trace)))
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
        self._begin(self._planned(self._plan(StretchKind.UPDATE, trace, unwanted=frozenset(pending.frees))))

    def _begin(self, stretch: Stretch) -> None:
        if stretch.trace is not None:
            self._planner.began(stretch.kind, stretch.trace)
        if stretch.reason:
            self._freed_blocks.return_at_once(f"the {stretch.kind} runs unplanned")
        self._level.begin()
        self._executor.pilot.begin(stretch)

    def _plan(self, kind: StretchKind, trace: Trace, **expected: Any) -> Draft:
        self._level.rise_on_device(trace)
        # Gradients are complete in the last backward before a step, as far as this step is as the last one.
        is_last = kind is StretchKind.TRAINING and self._forwards == self._forwards_a_step
        return self._planner.plan(
            Ask(
                kind=kind,
                trace=trace,
                start=self._executor.store.state,
                level_bytes=self._level.nbytes,
                taken_bytes=self._taken_bytes(),
                forwards=max(self._forwards, self._forwards_a_step),
                is_last=is_last,
                **expected,
            )
        )

    def _planned(self, draft: Draft) -> Stretch:
        course = Planned(draft.made, draft.trace)
        return Stretch(draft.ask.kind, course, reserve_bytes=draft.trace.peak, foreseen=draft.foreseen)

    def end_update(self) -> bool:
        """Ends the stretch of the optimizer's step, if that has one of its own; tells whether it has."""
        is_apart = self._executor.pilot.stretch.kind is StretchKind.UPDATE
        if is_apart:
            self.end()
        return is_apart

    def forget_plans(self, why: str) -> None:
        """Forgets all plans: units have come or have other sizes. The rest of the stretch is decided on the spot, later ones are planned anew."""
        self._planner.forget()
        if not self._executor.pilot.stretch.complete:
            self._executor.pilot.stretch.depart(why)

    def end(self) -> None:
        """Ends the stretch that was under way."""
        stretch = self._executor.pilot.stretch
        self._executor.wait_for_updates()
        self._executor.look_at_device()
        if stretch.reason:
            self._freed_blocks.return_at_once(f"the {stretch.kind} was not as planned")
        recorder, self._executor.recorder = self._executor.recorder, None
        known, self._current = self._current, None
        if known is not None:
            expected = known.expected
            expected.lets_go_at = self._own_number(stretch) or (0 if stretch.lets_go else expected.lets_go_at)
            if recorder is not None:
                self._learn(known, recorder.trace(), stretch)
            elif not self._recorded:
                known.learn(stretch, None)
        self._metering.stop()
        if stretch is not self._ended and stretch.kind is not StretchKind.OUTSIDE:
            budget = self._budget_bytes(knows_workspaces=True)
            is_over = self._executor.store.ledger.peak(self._budgets.machine.compute) > budget
            self._level.learn(stretch, known, is_over=is_over, budget_bytes=budget)
        if stretch is not self._ended and stretch.kind is not StretchKind.OUTSIDE:
            if stretch.kind is StretchKind.EVALUATION or (
                stretch.kind is StretchKind.TRAINING and not stretch.gave_gradients
            ):
                pass  # no part of a step: a forward alone, or a backward for other tensors than parameters
            elif stretch.reason:
                self._blame(stretch, stretch.reason + (known.explain(stretch) if known is not None else ""))
            elif not stretch.complete:
                self._blame(stretch, f"the {stretch.kind} ended after {stretch.position} ops of its trace")
        self._ended = stretch
        self._executor.pilot.begin(Stretch(StretchKind.OUTSIDE))
        self._late_planes.close()

    def _own_number(self, stretch: Stretch) -> int:
        """The number, without updates, of the moment before which somebody let go of what was not to stay; 0 where nobody did."""
        moments = stretch.trace.moments if stretch.trace is not None else ()
        return stretch.let_go_at - sum(moment.updates is not None for moment in moments[: stretch.let_go_at])

    def _blame(self, stretch: Stretch, reason: str) -> None:
        """Notes why a step was not as planned: the one under way, or, of an update in a stretch of its own, the one that is counted already."""
        if stretch.kind is not StretchKind.UPDATE:
            self._step_reasons.append(reason)
        elif self._was_planned:
            self._was_planned = False
            self.planned_steps -= 1
            self._count_reactive(reason)

    def _learn(self, known: KnownForward, recorded: Trace, stretch: Stretch) -> None:
        recorded = with_retention(recorded, self._budgets)
        whole = (
            any(moment.phase is Phase.BACKWARD for moment in recorded.moments) or stretch.kind is StretchKind.EVALUATION
        )
        if not recorded.moments or not whole:
            known.expected.measure_next = False
            return
        self._level.rise(recorded.peak)
        if stretch.reason:
            recorded = self._as_it_ran(recorded, is_first=known.expected.measured is None)
        known.learn(stretch, recorded)

    def _as_it_ran(self, recorded: Trace, *, is_first: bool) -> Trace:
        """The trace of a step that has run, for plans of later ones, none of which is to be refused for what this one took beside chunks."""
        state, budget = self._executor.store.state, self._budget_bytes(knows_workspaces=True)
        need = worst_moment(recorded, start=state, trained=True)
        if self._budgets.stream_device is not None or need.nbytes <= budget:
            return recorded
        if is_first:
            needed, has, moment = format_bytes(need.nbytes), format_bytes(budget), need.moment
            _log.warning("a step took more than any trace showed: %s at op %s; its budget is %s", needed, moment, has)
        return within(recorded, budget, start=state)

    def leave_room(self, nbytes: int) -> int:
        """Leaves room from the next stretch on for so many bytes more than are there now; gives the bytes that activations then have."""
        return self._level.leave_room(nbytes)

    def differentiates(self) -> None:
        """Notes that the backward under way makes a graph: the step differentiates a gradient."""
        self._executor.pilot.stretch.differentiates = True

    def backward_ended(self) -> None:
        """Ends the last moment of a backward call that is over, whatever the user does next."""
        recorder, self._executor.recorder = self._executor.recorder, None
        if recorder is not None and self._current is not None:
            self._learn(self._current, recorder.trace(), self._executor.pilot.stretch)
            self._recorded = True
        self._executor.pilot.stretch.reserve_bytes = 0  # activations are gone with the graph
        self._executor.pilot.stretch.is_over = True
        self._executor.look_at_device()
        self._level.stop()
        self._metering.pause()

    def abandon(self) -> None:
        """Abandons a forward or a backward that an exception has ended: what is made from now on is no part of it."""
        self._executor.recorder = None
        self._executor.pilot.stretch.reserve_bytes = 0
        self._executor.pilot.stretch.is_over = True
        self._metering.pause()

    def pause(self) -> None:
        """Ends a stretch whose moments have all come: state is read or written between stretches."""
        if self._executor.pilot.stretch.complete:
            self.end()

    def step_ended(self) -> None:
        """Ends a step: the optimizer has updated, and all that came since the last update was one step."""
        self.end()
        self._forwards, self._forwards_a_step = 0, self._forwards
        current, self._step_reasons = self._step_reasons, []
        self._was_planned = not current
        if current:
            self._count_reactive(current[-1])
        else:
            self.planned_steps += 1

    def _count_reactive(self, reason: str) -> None:
        self.reactive_steps += 1
        self.reason = reason
        _log.info("step %d was not as planned: %s", self.planned_steps + self.reactive_steps, reason)

    # budgets

    def _budget_bytes(self, *, knows_workspaces: bool) -> int:
        return self._budgets.room_bytes(knows_workspaces=knows_workspaces) - self._taken_bytes()
