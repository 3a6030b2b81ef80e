"""Stretches of a step: the plan of each, and what is known of each kind of forward.

A stretch is planned when it begins, from where every unit is then; the same start gives the same plan again, which is kept. The stretch after it is
expected to be what followed last time.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from patrickstar.core.layout import Layout
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import GRAD, PlaneRef
from patrickstar.core.trace import Phase, Trace
from patrickstar.errors import BudgetError
from patrickstar.plan.fit import Need, expect_room, within, worst_moment
from patrickstar.plan.make import make_plan, must_repeat
from patrickstar.plan.pilot import Planned, Reactive, Stretch, StretchKind
from patrickstar.plan.plan import Plan
from patrickstar.plan.recorder import TraceRecorder
from patrickstar.plan.residency import Residency
from patrickstar.plan.touches import gradients_freed
from patrickstar.plan.update_choice import UpdateChoice, UpdatePlaces, choose_places, choose_tiers
from patrickstar.plan.weave import own_moments, weave
from patrickstar.plan.whole_chunks import WholeChunks, update_whole_chunks
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
        budgets: the tiers, what each may hold, and what the allocator does. policy: of eviction. prefetch: moments by which transfers may be early.
        freed_blocks: learns what is planned, and of stretches that are not.
        taken_bytes: what of the compute tier's budget the user has taken (gradients assigned as `p.grad`, views of those in chunks).
        metering: counts live bytes. late_planes: has room for gradients that must wait.
        always_meter: whether every forward is metered (where the budget is a bound on an emulated arena).
        device_peak: what the allocator of a device has given out, where there is one that keeps it.
        choice: where updates are done. weaves: whether they are woven into the next forward. whole_chunks: whether a backward updates chunks whole
            where there is room.
        may_weave: whether nobody holds what an update would have to renew.

    Attributes:
        planned_steps, reactive_steps, reason: steps that went as planned, steps that did not, and why the last of these did not.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        layout: Layout,
        budgets: Budgets,
        freed_blocks: FreedBlocks,
        policy: str,
        prefetch: int | None,
        tracer: OfflineTracer,
        taken_bytes: Callable[[], int],
        metering: Metering,
        late_planes: LatePlanes,
        always_meter: bool,
        device_peak: DevicePeak | None,
        choice: UpdateChoice,
        weaves: bool,
        whole_chunks: bool,
        may_weave: Callable[[], bool],
    ) -> None:
        self._executor = executor
        self._layout = layout
        self._budgets = budgets
        self._freed_blocks = freed_blocks
        self._policy = policy
        self._prefetch = prefetch
        self._tracer = tracer
        self._taken_bytes = taken_bytes
        self._metering = metering
        self._late_planes = late_planes
        self._always_meter = always_meter
        self._level = DeviceLevel(
            device_peak, least_bytes=budgets.passes.update, set_aside_bytes=budgets.machine.costs.set_aside_bytes
        )
        self._choice = choice
        self._weaves = weaves
        self._whole_chunks = whole_chunks
        self._may_weave = may_weave

        self._known: OrderedDict[Signature, KnownForward] = OrderedDict()
        self._plans: OrderedDict[tuple[Hashable, Hashable], tuple[Plan, tuple[Trace | None, ...]]] = OrderedDict()
        self._whole: OrderedDict[Hashable, tuple[WholeChunks | None, Trace]] = OrderedDict()
        self._woven: OrderedDict[Hashable, tuple[Trace, tuple[Trace, Trace]]] = OrderedDict()
        self._norms: OrderedDict[Hashable, tuple[Trace, Trace]] = OrderedDict()
        self._follower: dict[StretchKind, Trace] = {}
        self._used_below: frozenset[PlaneRef] = frozenset()  # by the updates of the last step
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
        whole = self._update_whole_chunks(known) if kind is StretchKind.TRAINING else None
        stretch = self._forward(kind, expected, whole=whole)
        if expected.measure_next:
            stretch.depart(BEING_MEASURED)
        return stretch

    def _forward_with_updates(self, known: KnownForward) -> Stretch | None:
        """The stretch of a forward with the updates that are pending between its moments; None where these are better done before."""
        pending, woven = self._executor.pending, self._weave(known)
        if pending is None or woven is None:
            return None
        try:
            stretch = self._forward(StretchKind.TRAINING, known.expected, woven)
        except BudgetError:  # of the host below a device, which has room for one after the other
            return None
        pending.is_woven = True
        return stretch

    def _forward(
        self,
        kind: StretchKind,
        expected: KnownForward,
        woven: Trace | None = None,
        whole: WholeChunks | None = None,
    ) -> Stretch:
        """The stretch of a forward whose trace is known. `woven`: that trace with updates that are pending; `whole`: with those of its backward."""
        assert expected.trace is not None, "a forward without a trace has no plan"
        trace, pending = woven or expected.trace, self._executor.pending
        let_go = self._let_go(expected) if kind is StretchKind.TRAINING else set()
        frees: list[tuple[int, PlaneRef]] = []
        lets_go_at = expected.lets_go_at
        if woven is not None and pending is not None:
            let_go -= pending.frees
            frees += [(index, ref) for index, ref in gradients_freed(woven) if ref in pending.frees]
            if lets_go_at:
                lets_go_at = own_moments(woven)[lets_go_at - 1] + 1
        frees += [(lets_go_at - 1, ref) for ref in sorted(let_go)]
        if whole is not None:
            self._late_planes.open(whole.homes, whole.slots)
            trace, frees = whole.trace, [*frees, *whole.frees]
        # What is woven has been given that already.
        excess = self._level.excess_of(expected) if trace is expected.trace else 0
        try:
            stretch = self._stretch(
                kind, trace, following=self._next_of(kind), frees=tuple(frees), excess_bytes=excess, known=expected
            )
        except BudgetError as refusal:
            if not excess or refusal.tier != self._budgets.machine.compute.label:
                raise
            raise refused_as_learned(refusal, excess) from None
        stretch.lets_go, stretch.lets_go_at, stretch.own_trace = let_go, lets_go_at, expected.trace
        stretch.whole = whole
        return stretch

    def _weave(self, known: KnownForward) -> Trace | None:
        """The moments of a forward with the updates that are pending between them; None where these are better done before."""
        pending, expected = self._executor.pending, known.expected
        trace = expected.trace
        if pending is None or trace is None or not self._weaves or not self._may_weave():
            return None
        if known.by_chance or expected.measure_next or expected.departures or len(pending.waiting) < len(pending.trace):
            return None
        need = max(self._need(trace).nbytes, self._need(pending.trace).nbytes)
        knows = expected.knows_workspaces
        machine = self._budgets.machine_for(need, taken_bytes=self._taken_bytes(), knows_workspaces=knows)
        capacity = machine.budget[machine.compute]
        trace = self._with_room(trace, expected)
        key = id(trace), id(pending.trace), capacity
        if key not in self._woven:
            state = self._executor.store.state
            # Between the moments of the forward what libraries keep is there too.
            kept = self._budgets.fixed_bytes + (self._budgets.machine.costs.set_aside_bytes if knows else 0)
            woven = weave(trace, pending.trace, state=state, capacity_bytes=capacity, kept_bytes=kept)
            self._woven[key] = woven, (trace, pending.trace)
            if len(self._woven) > _KEPT_PLANS:
                self._woven.popitem(last=False)
        return self._woven[key][0]

    def _update_whole_chunks(self, known: KnownForward) -> WholeChunks | None:
        """The moments of a forward and backward that updates chunks whole; None where it updates parameter by parameter."""
        expected = known.expected
        trace = expected.trace
        if trace is None or not self._whole_chunks or not self._may_weave():
            return None
        if expected is not known or known.by_chance or expected.measure_next or expected.departures:
            return None
        machine = self._machine_for(trace, knows_workspaces=expected.knows_workspaces)
        trace = self._with_room(trace, expected)
        capacity = machine.budget[machine.compute]
        key = id(trace), capacity, self._level.nbytes
        if key not in self._whole:
            found = update_whole_chunks(
                trace,
                state=self._executor.store.state,
                slots_of_gradient=self._late_planes.slots_of_gradient,
                capacity_bytes=capacity,
                choose_places=self._places_of,
            )
            self._whole[key] = found, trace
            if len(self._whole) > _KEPT_PLANS:
                self._whole.popitem(last=False)
        return self._whole[key][0]

    def _places_of(self, updates: Trace, state: Residency) -> UpdatePlaces:
        """The tiers where updates in a backward are best done, and their gradients rest."""
        machine = self._budgets.machine_for(0, taken_bytes=self._taken_bytes())
        return choose_places(updates, state, machine=machine, peak_bytes=self._level.nbytes, choice=self._choice)

    def tiers_of(self, updates: Trace) -> Mapping[int, Tier]:
        """The tiers, by chunk, of updates that are best not done where the step computes."""
        if not self._weaves and self._choice.tier is None:
            return {}
        tiers = choose_tiers(
            updates,
            self._executor.store.state,
            machine=self._budgets.machine_for(0, taken_bytes=self._taken_bytes()),
            peak_bytes=self._level.nbytes,
            choice=self._choice,
        )
        self._used_below = frozenset(PlaneRef(chunk, GRAD) for chunk in tiers)
        return tiers

    def _next_of(self, kind: StretchKind) -> StretchKind:
        """The kind of stretch that is expected after one of this kind."""
        match kind:
            case StretchKind.TRAINING | StretchKind.NORM if not self._weaves:
                return StretchKind.UPDATE
            case StretchKind.TRAINING if StretchKind.NORM in self._follower:
                return StretchKind.NORM
            case StretchKind.NORM | StretchKind.UPDATE:
                return StretchKind.TRAINING
        return kind

    def _let_go(self, known: KnownForward) -> set[PlaneRef]:
        """The gradients that will be let go of in the middle of a forward and its backward, if these go as the last time."""
        state = self._executor.store.state
        if known.trace is None or not 0 < known.lets_go_at < len(known.trace.moments):
            return set()
        return {ref for ref in state.home if ref.plane == GRAD and not state.is_free(ref)}

    def _explore(
        self, model: nn.Module, named: Mapping[str, nn.Parameter], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> KnownForward:
        if not can_be_traced((args, kwargs)):
            unknown = KnownForward(reason=_UNTRACEABLE.format("its inputs hold objects that a trial run could change"))
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
                _log.info("no forecast for this forward (%s): it runs reactively once and is measured", problem)
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
        on_device = self._budgets.stream_device is not None
        here = trace if not self._weaves or on_device else self._where_it_is(trace)
        self._begin(self._stretch(StretchKind.NORM, here, following=self._next_of(StretchKind.NORM)))
        return here

    def _where_it_is(self, trace: Trace) -> Trace:
        touches = tuple(self._executor.pilot.nearest(moment.touches) for moment in trace.moments)
        key = id(trace), touches
        if key not in self._norms:
            moments = (replace(moment, touches=own) for moment, own in zip(trace.moments, touches, strict=True))
            self._norms[key] = Trace(tuple(moments)), trace
            if len(self._norms) > _KEPT_PLANS:
                self._norms.popitem(last=False)
        return self._norms[key][0]

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
        frees = tuple((index, ref) for index, ref in gradients_freed(trace) if ref in pending.frees)
        following = self._next_of(StretchKind.UPDATE)
        self._begin(self._stretch(StretchKind.UPDATE, trace, following=following, frees=frees))

    def _begin(self, stretch: Stretch) -> None:
        if stretch.trace is not None:
            self._follower[stretch.kind] = stretch.trace
        if stretch.reason:
            self._freed_blocks.return_at_once(f"the {stretch.kind} is decided moment by moment")
        self._level.begin()
        self._executor.pilot.begin(stretch)

    def _stretch(
        self,
        kind: StretchKind,
        trace: Trace,
        *,
        following: StretchKind,
        frees: tuple[tuple[int, PlaneRef], ...] = (),
        excess_bytes: int = 0,
        known: KnownForward | None = None,
    ) -> Stretch:
        knows = known is not None and known.knows_workspaces
        self._level.rise_on_device(trace)
        foreseen = trace = self._level.with_excess(trace, excess_bytes)
        state, trace = self._executor.store.state, self._with_kept_bytes(trace, knows_workspaces=knows)
        after = self._follower.get(following)
        contents = (
            frozenset(state.newest.items()),
            *map(frozenset, state.taken.values()),
            frozenset(state.in_flight.items()),
        )
        # Traces are told apart by identity: those in a key are kept alive beside the plan.
        # Gradients are complete in the last backward before a step, as far as this step is as the last one.
        is_last = kind is StretchKind.TRAINING and self._forwards == self._forwards_a_step
        goes_down = self._used_below if is_last else frozenset[PlaneRef]()
        asked = (kind, id(trace), id(after), self._taken_bytes(), frees, goes_down, knows)
        key = (asked, contents)
        if key not in self._plans:
            earlier = sum(other == asked for other, _ in self._plans)  # from other states
            earlier //= max(self._forwards, self._forwards_a_step, 1)  # each forward of a step begins elsewhere
            plan = make_plan(
                trace,
                layout=self._layout,
                machine=self._machine_for(trace, knows_workspaces=knows),
                start=state,
                policy=self._policy,
                following=after,
                frees=frees,
                prefetch=self._prefetch,
                goes_down=goes_down,
                repeats=must_repeat(earlier, trace=trace, following=after),
            )
            self._plans[key] = plan, (trace, after)
            self._freed_blocks.plan(plan, trace, self._layout)
            if len(self._plans) > _KEPT_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return Stretch(kind, Planned(self._plans[key][0], trace), reserve_bytes=trace.peak, foreseen=foreseen)

    def end_update(self) -> bool:
        """Ends the stretch of the optimizer's step, if that has one of its own; tells whether it has."""
        is_apart = self._executor.pilot.stretch.kind is StretchKind.UPDATE
        if is_apart:
            self.end()
        return is_apart

    def forget_plans(self, why: str) -> None:
        """Forgets all plans: units have come or have other sizes. The rest of the stretch is decided on the spot, later ones are planned anew."""
        self._plans.clear()
        self._woven.clear()
        self._norms.clear()
        self._whole.clear()
        self._level.forget_traces()
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
                self._blame(stretch, f"the {stretch.kind} ended after {stretch.position} moments of its trace")
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
        known.learn(stretch, self._as_it_ran(recorded, is_first=known.expected.measured is None))

    def _as_it_ran(self, recorded: Trace, *, is_first: bool) -> Trace:
        """The trace of a step that has run, for plans of later ones, none of which is to be refused for what this one took beside chunks."""
        state, budget = self._executor.store.state, self._budget_bytes(knows_workspaces=True)
        need = worst_moment(recorded, start=state, trained=True)
        if self._budgets.stream_device is not None or need.nbytes <= budget:
            return recorded
        if is_first:
            needed, has, moment = format_bytes(need.nbytes), format_bytes(budget), need.moment
            _log.warning("a step has run that no forecast showed, in %s at %s; its budget is %s", needed, moment, has)
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

    def _machine_for(self, trace: Trace, *, knows_workspaces: bool) -> Machine:
        need = self._need(trace).nbytes
        return self._budgets.machine_for(need, taken_bytes=self._taken_bytes(), knows_workspaces=knows_workspaces)

    def _with_kept_bytes(self, trace: Trace, *, knows_workspaces: bool) -> Trace:
        """The trace with what an allocator of a device keeps at every moment."""
        budget = self._budget_bytes(knows_workspaces=knows_workspaces)
        return self._level.with_kept_bytes(trace, budget_bytes=budget, start=self._executor.store.state)

    def _with_room(self, trace: Trace, expected: KnownForward) -> Trace:
        """The trace of a forward with what such steps took more, and with what an allocator of a device keeps."""
        trace = self._level.with_excess(trace, self._level.excess_of(expected))
        return self._with_kept_bytes(trace, knows_workspaces=expected.knows_workspaces)

    def _need(self, trace: Trace) -> Need:
        return worst_moment(trace, start=self._executor.store.state)
