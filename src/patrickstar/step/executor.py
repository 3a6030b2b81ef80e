"""The executor: has done what must happen before each event of a step. Asks the pilot what that is, and the store to do it.

Events tell the executor of every use of a parameter, gradients and updates of every chunk that they need. The executor owns the question "are the
bytes there now?"; gradients and updates own what is done with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from patrickstar.core.planes import GRAD, PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch
from patrickstar.errors import BudgetError
from patrickstar.memory.device_failure import noticed_at
from patrickstar.memory.store import ChunkStore
from patrickstar.plan.actions import Action, Work, slots_taken
from patrickstar.plan.pilot import Pilot
from patrickstar.plan.recorder import TraceRecorder
from patrickstar.plan.stretch import Stretch
from patrickstar.step.device_peak import DevicePeak
from patrickstar.step.pending_step import PendingStep
from patrickstar.step.pressure import Pressure
from patrickstar.torch_private import Plain, backward_id
from patrickstar.tracing.live_bytes import LiveBytes
from patrickstar.units import format_bytes

__all__ = ["Executor", "MeterBound"]

_Moment = tuple[Phase, str, Sequence[Touch], Collection[PlaneRef], Work | None]
"""A moment as the pilot decides about it: phase, label, touches, what is held, and the update that begins."""


@dataclass(frozen=True, slots=True)
class MeterBound:
    """The bound on what slots and metered bytes together may take of the compute tier. `enforced`: whether exceeding it is an error."""

    nbytes: int
    enforced: bool


class Executor:
    """Has everything done that must happen before a moment, one moment after another.

    Args:
        pressure: the bound on the process itself, if any. meter_bound: the bound on live bytes while they are metered, if any.
        device_peak: what the allocator of a device has given out, where there is one that keeps it.

    Attributes:
        recorder: writes down what happens, where somebody wants to know.
        meter: of live bytes, while one is on. meter_acts: whether chunks leave where the meter shows more than there is room for.
        pending: the optimizer step that was called and is not over. carry_out_step: carries out what is left of it, in a stretch of its own.
            step_is_over: is told of its end.
    """

    carry_out_step: Callable[[PendingStep], None]
    step_is_over: Callable[[PendingStep], None]

    def __init__(
        self,
        pilot: Pilot,
        store: ChunkStore,
        *,
        pressure: Pressure | None = None,
        meter_bound: MeterBound | None = None,
        device_peak: DevicePeak | None = None,
    ) -> None:
        self.pilot = pilot
        self.store = store
        self.lock = threading.RLock()
        self._compute = store.state.compute
        self._pressure = pressure
        self._meter_bound = meter_bound
        self._device_peak = device_peak

        self.recorder: TraceRecorder | None = None
        self.pending: PendingStep | None = None
        self.meter: LiveBytes | None = None
        self.meter_acts = True
        self._nonmodel_before = 0
        self._making_bytes = 0
        self._assembling_bytes = 0

    # moments

    def moment(self, phase: Phase, label: str, touches: Sequence[Touch]) -> None:
        """Makes what these touches need usable where they are. Units to be written count as written.

        Raises:
            BudgetError: the moment does not fit. DeviceError: the disk does not do its work.
        """
        with self.lock:
            self._update_before(touches)
            self._moment(phase, label, touches)

    def _moment(self, phase: Phase, label: str, touches: Sequence[Touch], update: Work | None = None) -> None:
        with self.lock:
            store, pilot = self.store, self.pilot
            self.look_at_device()
            held = store.leases.held()
            if self.recorder is not None and phase is not Phase.STEP:
                self.recorder.moment(phase, label, touches, held)
            actions = pilot.planned(phase, touches, held)
            if actions is None:
                self._use_what_came()
                actions = pilot.decided(phase, label, touches, held, update)
            if self._pressure is not None or self.meter is not None:
                actions = self._within_bounds(actions, (phase, label, touches, held, update))
            store.limit_slots = pilot.capacity_slots
            now = self._nonmodel_now()
            if actions:
                # What is alive between two moments is part of both.
                store.hold_beside(now if self._is_measured() else min(now, self._nonmodel_before))
                self._carry_out(actions, f"{phase} {label}")
            if store.committed_slots > store.limit_slots:
                store.trim()
            store.hold_beside(now)
            self._nonmodel_before = now
            with noticed_at(f"op {phase} {label}"):
                store.compute(touches)
            for touch in touches:
                if touch.writes:
                    store.wrote(touch.ref, touch.tier)

    def use(self, phase: Phase, label: str, touches: Sequence[Touch]) -> list[Tensor]:
        """The units that a moment touches, in that order, resident: 1-D tensors, valid until the next moment. Raises what `moment` raises."""
        with self.lock:
            self.moment(phase, label, touches)
            with torch.inference_mode(False):
                return [self.store.tensor(touch.ref, touch.tier) for touch in touches]

    def use_where_it_is(self, phase: Phase, label: str, touches: Sequence[Touch]) -> list[Tensor]:
        """The units of these touches, as `use` gives them, on the tier nearest to the one that computes that has their last contents in memory."""
        with self.lock:
            self._update_before(touches)
            return self.use(phase, label, self.pilot.nearest(touches))

    def update(self, moment: Moment) -> None:
        """Begins the update of a chunk, which is pending. Raises what `moment` raises; it is still pending then."""
        pending, chunk = self.pending, moment.updates
        assert pending is not None, "no update is pending"
        assert chunk is not None, "a moment of no update"
        with self.lock:
            tier, touches = moment.update_tier or self._compute, moment.touches
            held = self.store.leases.held()
            if tier is not self._compute and any(touch.ref in held for touch in touches):
                # Somebody has its address there: what is updated elsewhere would leave that.
                tier, touches = self._compute, tuple(touch._replace(tier=None) for touch in touches)
            self._moment(moment.phase, moment.label, touches, update=Work.update(chunk, tier))
            gradient = PlaneRef(chunk, GRAD)
            if gradient in pending.frees:
                self.store.forget(gradient)

    def _update_before(self, touches: Sequence[Touch]) -> None:
        """Begins the updates that come before a moment with these touches: those that the plan has there, and any that must be over.

        A step that is not woven into the forward under way is carried out first: somebody may hold what it would have to renew.
        """
        pending = self.pending
        if pending is None:
            return
        if not pending.is_woven:
            self.settle()
            return
        while (planned := self.pilot.stretch.next_update()) is not None and planned.updates in pending.waiting:
            self.update(planned)
        self._update_due(pending, touches)
        self._notice_end(pending)

    def _update_due(self, pending: PendingStep, touches: Sequence[Touch]) -> None:
        for moment in pending.due(touches):
            if moment.updates not in {work.of.chunk for work in self.store.state.updates}:
                self.update(moment)

    def _notice_end(self, pending: PendingStep) -> None:
        if (pending.is_done or pending.failed is not None) and self.pending is pending:
            self.pending = None
            self.step_is_over(pending)

    def open(self) -> None:
        """Does what may be done as soon as a stretch of the step has begun."""
        with self.lock:
            store, pilot = self.store, self.pilot
            self._update_before(())
            if self.meter is None and self._is_measured():
                store.hold_beside(self._nonmodel_now())
            elif self.meter is None:
                # What is alive between two moments is part of both: what the last stretch held is gone, as far as the next does not hold it.
                store.hold_beside(min(self._nonmodel_at(pilot.stretch, 0), self._nonmodel_before))
            actions = pilot.opening(store.leases.held())
            store.limit_slots = pilot.capacity_slots
            if actions:
                self._carry_out(actions, f"the start of the {pilot.stretch.kind}")
            store.trim()

    def _carry_out(self, actions: Sequence[Action], during: str) -> None:
        try:
            with self._uncounted():
                self.store.carry_out(actions, during=during)
        except BaseException:
            # What a plan has from here on begins elsewhere.
            self.pilot.stretch.depart(f"a transfer at {during} was not done")
            raise

    def settle(self) -> None:
        """Carries out what is left of the optimizer step that is pending, if one is."""
        with self.lock:
            pending = self.pending
            if pending is None:
                return
            if backward_id() == -1:
                pending.close()  # where a backward that brought gradients was left, no more come
            if self.store.state.updates:
                self.pilot.stretch.depart("the optimizer's updates were waited for at once")
            self.wait_for_updates()
            if pending.waiting and pending.failed is None:
                self.carry_out_step(pending)
                self.wait_for_updates()

    def use_what_came(self, why: str) -> None:
        """Has gradients that wait in chunks used, and takes no more of them in this backward. `why`: what the plan did not have."""
        with self.lock:
            if self.pending is not None and self.pending.is_woven:
                self.pilot.stretch.depart(why)
                self._use_what_came()
                self.settle()

    def _use_what_came(self) -> None:
        """Has gradients that wait in chunks used: what is decided on the spot counts on their room."""
        if self.pending is not None and self.pending.arrivals:
            self.pending.close()
            self.settle()

    def update_held(self) -> None:
        """Carries out what is left of the optimizer step that is pending, if one is, for whoever holds anything.

        Where that is woven into the forward under way, nobody holds anything but units.
        """
        with self.lock:
            if self.pending is None or not self.pending.is_woven:
                self.settle()
                return
            held = [Touch(ref) for ref in self.store.leases.held()]
            self._update_due(self.pending, held)
            for touch in held:
                if self.store.state.updates_of(touch.ref):
                    self._land(touch.ref, "was used")

    def wait_for_updates(self) -> None:
        """Waits for the updates that have begun."""
        with self.lock:
            try:
                if self.store.state.updates:
                    with self._uncounted():
                        self.store.wait_for_updates()
            finally:
                if self.pending is not None:
                    self._notice_end(self.pending)

    def release(self, ref: PlaneRef) -> None:
        """Drops a unit's contents, which nobody wants any more: in the middle of a stretch, or between two."""
        with self.lock:
            if self.pending is not None and self.pending.reads(ref):
                if self.pending.is_woven:
                    self.pilot.stretch.depart(f"{ref} was released while its update was pending")
                self.pending.frees.add(ref)
                return
            self._land(ref, "was released")
            if self.pilot.stretch.let_go(ref):
                self.store.forget(ref)
            else:
                self.store.release(ref)

    def wrote(self, ref: PlaneRef) -> None:
        """Notes a change in place that no moment has announced. What is being written back has to be written back again."""
        with self.lock:
            self._land(ref, "was changed")
            self.store.wrote(ref)

    def _land(self, ref: PlaneRef, why: str) -> None:
        """Ends a transfer of a unit before its time, if one is under way: the plan, which would wait for it later, is followed no longer."""
        if self.store.state.used_by(ref):
            what = "on its way" if self.store.state.flight(ref) else "in an update"
            self.pilot.stretch.depart(f"{ref} {why} while it was {what}")
            with self._uncounted():
                self.store.land(ref)

    def change_phase(self) -> Phase:
        """The phase of a change in place that has just been noticed: part of a stretch that is recorded or goes as planned, or of none."""
        if backward_id() != -1:
            return Phase.RECOMPUTE
        stretch = self.pilot.stretch
        is_known = self.recorder is not None or (stretch.followed is not None and not stretch.complete)
        return Phase.FORWARD if is_known else Phase.STEP

    # room

    @contextmanager
    def making(self, nbytes: int) -> Iterator[None]:
        """Leaves room for a tensor of so many bytes, which is being filled, in the moments meanwhile."""
        stretch = self.pilot.stretch
        stretch.reserve(nbytes)
        self._making_bytes += nbytes
        try:
            yield
        finally:
            stretch.reserve(-nbytes)
            self._making_bytes -= nbytes

    @contextmanager
    def assembling(self, nbytes: int) -> Iterator[None]:
        """Counts a tensor that is being put together, which the budget counts by itself, among what the process grows by."""
        self._making_bytes += nbytes
        self._assembling_bytes += nbytes
        try:
            yield
        finally:
            self._making_bytes -= nbytes
            self._assembling_bytes -= nbytes

    def _within_bounds(self, actions: Sequence[Action], moment: _Moment) -> Sequence[Action]:
        """Actions that must be done before the moment, and make neither slots and live bytes nor the process too large: these, or others."""
        store, slot_bytes = self.store, self.store.state.slot_bytes
        if self._meter_bound is not None and self._meter_bound.enforced:
            in_use = self._slots_in_use(actions)
            excess = self._excess_bytes(in_use * slot_bytes)
            if excess:
                self.pilot.yield_bytes(excess, slots=in_use)
                actions = self.pilot.decided(*moment)
                self._expect_room(self._slots_in_use(actions) * slot_bytes)
        if self._pressure is None:
            return actions
        in_use = self._slots_in_use(actions)
        # Those that will hold pages.
        slots = max(in_use, min(store.committed_slots, self.pilot.capacity_slots))
        growth = (slots - store.committed_slots) * slot_bytes + self._rise_bytes()
        # Pages of slots whose transfers are under way come with these. Those that have come count as resident already.
        arriving = store.arriving_slots * slot_bytes
        if arriving and self._pressure.is_exceeded_by(growth + arriving):
            arriving = store.arriving_bytes()
        excess = self._pressure.excess_bytes(growth + arriving)
        if not excess:
            return actions
        self.pilot.yield_bytes(excess, slots=slots)
        return self.pilot.decided(*moment)

    def _slots_in_use(self, actions: Sequence[Action]) -> int:
        """Number of slots that will be in use once these actions are done."""
        in_use = self.store.state.slots_used[self._compute]
        for action in actions:
            in_use += slots_taken(action, self._compute)
        return in_use

    def _rise_bytes(self) -> int:
        """Bytes by which what is alive beside the slots grows until the next moment, as far as that is known."""
        stretch = self.pilot.stretch
        if stretch.followed is None or not stretch.position:
            return self._making_bytes
        # From what is alive now, not from the last moment's peak: what was made in between may be gone, and its memory returned.
        moment = stretch.followed.trace.moments[stretch.position - 1]
        return self._making_bytes + moment.nonmodel_bytes - moment.live_bytes

    def look_at_device(self) -> None:
        """Notes what the allocator of a device has given out since the last moment, and by how much that is more than was foreseen."""
        found = None if self._device_peak is None else self._device_peak.look()
        if found is None:
            return
        self.store.hold_beside(found)
        self.store.hold_beside(self._nonmodel_now())  # what was there in between is there no more
        stretch = self.pilot.stretch
        if stretch.followed is not None and stretch.position:
            stretch.exceed(found - stretch.followed.foreseen.moments[stretch.position - 1].nonmodel_bytes)

    def _is_measured(self) -> bool:
        """Tells whether what lies beside chunks is known by more than a trace."""
        return self.meter is not None or (self._device_peak is not None and self._device_peak.now is not None)

    def _nonmodel_now(self) -> int:
        """Bytes of non-model data: as the allocator or a meter has them, else as the trace does, else what is reserved for them."""
        if self._device_peak is not None and self._device_peak.now is not None:
            return self._device_peak.now
        if self.meter is not None:
            return self.meter.live
        stretch = self.pilot.stretch
        return self._nonmodel_at(stretch, stretch.position - 1)

    def _nonmodel_at(self, stretch: Stretch, index: int) -> int:
        if stretch.followed is not None and stretch.followed.trace.moments:
            return stretch.followed.trace.moments[index].nonmodel_bytes
        return stretch.reserve_bytes if stretch.trace is not None else 0

    # live bytes, where they are metered

    def live_changed(self, live: int) -> None:
        """Makes room for the live bytes that the meter has just seen. BudgetError where the bound is hard and chunks cannot make room."""
        bound = self._meter_bound
        if bound is not None and self.meter_acts and self._excess_bytes(self._slot_bytes()):
            # More than was foreseen: chunks that nothing uses right now leave, which is said, and only then it is an error.
            self._make_way(self._metered_room(bound) - live)
            if bound.enforced:
                self._expect_room(self._slot_bytes())
        self.store.hold_beside(live)

    def _slot_bytes(self) -> int:
        return self.store.state.slots_used[self._compute] * self.store.state.slot_bytes

    def _metered_room(self, bound: MeterBound) -> int:
        return bound.nbytes - self.store.leases.assembled_bytes() - self._assembling_bytes

    def _excess_bytes(self, slot_bytes: int) -> int:
        """Bytes by which slots and live bytes would exceed the bound, with so many bytes of slots in use."""
        if self.meter is None or self._meter_bound is None or LiveBytes.is_shared():
            return 0
        return max(0, slot_bytes + self.meter.live - self._metered_room(self._meter_bound))

    def _expect_room(self, slot_bytes: int) -> None:
        """Raises BudgetError where slots and live bytes would exceed the bound."""
        if not self._excess_bytes(slot_bytes):
            return
        assert self.meter is not None
        assert self._meter_bound is not None
        live, budget, stretch = self.meter.live, self._metered_room(self._meter_bound), self.pilot.stretch
        held = slot_bytes + live
        # Where there is no forecast, or it has just been shown to be wrong, nobody knows what is still to come: a quarter more is an estimate.
        smallest = held + held // 4
        self.unmeter()  # this step is over
        raise BudgetError(
            f"{self._compute.label} memory of {format_bytes(budget)} is exceeded at op {stretch.position} of the {stretch.kind}: "
            f"{format_bytes(held)} = chunk slots {format_bytes(slot_bytes)} + activations {format_bytes(live)}\n"
            f"  give {self._compute.label}_memory >= {format_bytes(smallest)}, or a smaller batch",
            tier=self._compute.label,
            moment=f"{stretch.position} {stretch.kind}",
            needed_bytes=held,
            available_bytes=budget,
            smallest_bytes=smallest,
        )

    def _make_way(self, slot_bytes: int) -> None:
        """Makes chunks that nothing uses leave, in the middle of a moment, until slots in use take no more than these bytes, if that can be."""
        with self.lock:
            self._carry_out(self.pilot.clearing(slot_bytes, self.store.leases.held()), "the middle of an op")
            self.store.trim()

    def unmeter(self) -> None:
        """Stops metering: what is made from now on is no part of the step."""
        if self.meter is not None:
            self.meter.counts = False
            self.meter = None
        self.store.hold_beside(0)

    # our own operations

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A context as `quiet`, in which bytes are not counted: copies handed to the user as host memory, a kernel's few scalars."""
        with self._uncounted(), self.quiet():
            yield

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """A context in which bytes are not counted: a lane may do its works in the thread that waits for them."""
        meter = self.meter
        if meter is None:
            yield
            return
        counted, meter.counts = meter.counts, False
        try:
            yield
        finally:
            meter.counts = counted

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A context for the library's own tensor operations: no gradients, no inference tensors, no subclasses."""
        with torch.inference_mode(False), torch.no_grad(), Plain():
            yield
