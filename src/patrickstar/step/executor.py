"""The executor: has done what must happen before each event of a step. Asks the pilot what that is, the room whether it may, and the store to do it.

Events tell the executor of every use of a parameter, gradients and updates of every chunk that they need. The executor owns the question "are the
bytes there now?"; gradients and updates own what is done with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from patrickstar.core.planes import GRAD, PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch
from patrickstar.memory.device_failure import noticed_at
from patrickstar.memory.store import ChunkStore
from patrickstar.plan.actions import Wait, Work
from patrickstar.plan.pilot import Pilot
from patrickstar.step.pending_step import PendingStep
from patrickstar.step.room import Room
from patrickstar.torch_private import NotInference, Plain, backward_id, no_gradients
from patrickstar.tracing.live_bytes import TraceRecorder


class Executor:
    """Has everything done that must happen before a moment, one moment after another.

    Attributes:
        lock: held by whoever changes what is in memory. recorder: writes down what happens, where somebody wants to know.
        pending: the optimizer step that was called and is not over. Who does it, it knows itself.
    """

    def __init__(self, pilot: Pilot, store: ChunkStore, room: Room) -> None:
        self.pilot = pilot
        self.store = store
        self.room = room
        self.lock = room.lock
        self._compute = store.state.compute

        self._last: Sequence[Touch] = ()  # of the last moment
        self.recorder: TraceRecorder | None = None
        self.pending: PendingStep | None = None

    def moment(self, phase: Phase, label: str, touches: Sequence[Touch]) -> None:
        """Makes what these touches need usable where they are. Units to be written count as written.

        Raises:
            BudgetError: the moment does not fit. DeviceError: the disk does not do its work.
        """
        with self.lock:
            if self.pending is not None:
                self._update_before(touches)
            self._moment(phase, label, touches)

    def _moment(self, phase: Phase, label: str, touches: Sequence[Touch], update: Work | None = None) -> None:
        store, pilot, room = self.store, self.pilot, self.room
        room.look()
        held = store.leases.held()
        if self.recorder is not None and phase is not Phase.STEP:
            self.recorder.moment(phase, label, touches, held)
        actions = pilot.planned(phase, touches, held)
        if actions is None:
            self.use_what_came()
            actions = pilot.decided(phase, label, touches, held, update)
        actions = room.within(actions, (phase, label, touches, held, update))
        store.units.limit_slots = pilot.capacity_slots
        room.make(actions, phase, label, self.pending)
        if store.works.is_queued:
            with noticed_at(f"op {phase} {label}"):
                store.works.compute(touches)
        for touch in touches:
            if touch.writes:
                store.wrote(touch.ref, touch.tier)
        self._last = touches

    def use(self, phase: Phase, label: str, touches: Sequence[Touch], *, goes_on: bool = False) -> list[Tensor]:
        """The units that a moment touches, in that order, resident: 1-D tensors, valid until the next moment. Raises what `moment` raises.

        `goes_on`: whether it is no moment of its own where the last one has written the same.
        """
        with self.lock:
            state = self.store.state
            is_there = goes_on and touches == self._last and touches[0].ref not in state.under_way
            # It may have left, or been let go of, meanwhile.
            if not is_there or state.newest.get(touches[0].ref) != {self._compute}:
                self.moment(phase, label, touches)
            elif self.store.works.is_queued:
                self.store.works.compute(touches)
            with NotInference():
                units = []
                for touch in touches:
                    units.append(self.store.tensor(touch.ref, touch.tier))  # noqa: PERF401  (a call less, at each gradient)
                return units

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
            pending.doer.over(pending)

    def open(self) -> None:
        """Does what may be done as soon as a stretch of the step has begun."""
        with self.lock:
            self._update_before(())
            held = self.store.leases.held()
            # Its loads are under way together with what leaves for the first moment: they need the room at once.
            actions = self.room.within(self.pilot.opening(held), (Phase.FORWARD, "start", (), held, None))
            self.store.units.limit_slots = self.pilot.capacity_slots
            self.room.open(actions, self.pending)

    def settle(self) -> None:
        """Carries out what is left of the optimizer step that is pending, if one is."""
        with self.lock:
            pending = self.pending
            if pending is None:
                return
            if self.store.state.updates:
                self.pilot.stretch.depart("the optimizer's updates were waited for at once")
            self.wait_for_updates()
            if pending.waiting and pending.failed is None:
                pending.doer.carry_out(pending)
                self.wait_for_updates()

    def use_what_came(self, why: str = "") -> None:
        """Has gradients that wait in chunks used: what is decided on the spot counts on their room.

        `why`: what the plan did not have; then no more gradients are taken in this backward.
        """
        with self.lock:
            pending = self.pending
            is_left = pending is not None and pending.is_woven and bool(why)
            if is_left:
                self.pilot.stretch.depart(why)
            if pending is not None and (is_left or pending.arrivals):
                pending.close()
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
                    with self.room.uncounted():
                        self.store.carry_out(list(map(Wait, self.store.state.updates)))
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
            with self.room.uncounted():
                self.store.land(ref)

    def change_phase(self) -> Phase:
        """The phase of a change in place that has just been noticed: part of a stretch that is recorded or goes as planned, or of none."""
        if backward_id() != -1:
            return Phase.RECOMPUTE
        stretch = self.pilot.stretch
        is_known = self.recorder is not None or (stretch.followed is not None and not stretch.complete)
        return Phase.FORWARD if is_known else Phase.STEP

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A context as `quiet`, in which bytes are not counted: copies handed to the user as host memory, a kernel's few scalars."""
        with self.room.uncounted(), self.quiet():
            yield

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A context for the library's own tensor operations: no gradients, no inference tensors, no subclasses."""
        with NotInference(), Plain():
            no_gradients()
            yield
