"""Takes the events of a step, asks the pilot what must happen before each, and has it done.

The binding calls it for every use of a parameter and every gradient; the optimizer for every chunk it updates. It owns the question "is it
there now?"; gradients and updates own what is done with the bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from patrickstar.core.machine import Tier
from patrickstar.core.plane import PlaneRef
from patrickstar.core.trace import Phase, Rows, Touch
from patrickstar.memory.mover import Mover
from patrickstar.plan.actions import Action, Copy, Create, Drop
from patrickstar.plan.pilot import Pilot, Stretch
from patrickstar.plan.recorder import TraceRecorder
from patrickstar.plan.rows import link_of
from patrickstar.step.pressure import Pressure
from patrickstar.torch_private import Plain, backward_id
from patrickstar.tracing.live_bytes import LiveBytes

__all__ = ["Executor"]


class ArenaBound(Protocol):
    """What slots and live bytes together may not exceed."""

    def excess_bytes(self, slot_bytes: int) -> int:
        """By how much they would, with so many bytes of slots in use; 0 where there is room."""

    def expect_room(self, slot_bytes: int) -> None:
        """BudgetError where they would."""


class Executor:
    """One moment after another.

    Args:
        held: the units in use from earlier moments, which may not move. pressure: where the process itself has a bound.

    Attributes:
        recorder: writes down what happens, where somebody wants to know.
        meter: of live bytes, while one is on. arena: the bound that it is held against, where there is a hard one.
        pending: what must be done before any further moment (an optimizer step that was called and not yet carried out).
    """

    def __init__(
        self,
        pilot: Pilot,
        mover: Mover,
        *,
        compute: Tier,
        held: Callable[[], Collection[PlaneRef]],
        pressure: Pressure | None = None,
    ) -> None:
        self.pilot = pilot
        self.mover = mover
        self.lock = threading.RLock()
        self._compute = compute
        self._held = held
        self._pressure = pressure

        self.recorder: TraceRecorder | None = None
        self.pending: Callable[..., None] | None = None
        self.meter: LiveBytes | None = None
        self.arena: ArenaBound | None = None
        self._nonmodel_before = 0
        self._making_bytes = 0

    def settle(self) -> None:
        """Does what is pending."""
        with self.lock:
            pending, self.pending = self.pending, None
            if pending is not None:
                pending()

    def open(self) -> None:
        """A stretch of the step has begun."""
        with self.lock:
            if self.meter is None:
                # What is alive between two moments is part of both: what the last stretch held is gone, as far as the next does not hold it.
                first = self._nonmodel_at(self.pilot.stretch, 0)
                self.mover.ledger.nonmodel(self._compute, min(first, self._nonmodel_before))
            actions = self.pilot.opening(self._held())
            self.mover.store.limit_slots = self.pilot.capacity_slots
            if actions:
                self.mover.carry_out(actions)
            self.mover.store.trim()

    def release(self, ref: PlaneRef) -> None:
        """Nobody wants a unit's contents any more: in the middle of a stretch, or between two."""
        with self.lock:
            if self.pilot.let_go(ref):
                self.mover.forget(ref)
            else:
                self.mover.release(ref)

    def make_way(self, slot_bytes: int) -> None:
        """In the middle of a moment: chunks that nothing uses leave until no more than these bytes of slots are in use, if that can be."""
        with self.lock:
            self.mover.carry_out(self.pilot.clearing(slot_bytes, self._held()))
            self.mover.store.trim()

    def moment(self, phase: Phase, label: str, touches: Sequence[Touch], rows: Rows | None = None) -> None:
        """What these touches need is resident when this returns, and rows can be used at home. Units to be written count as written.

        Raises:
            BudgetError: it does not fit. DeviceError: the disk does not do its work.
        """
        with self.lock:
            if self.pending is not None:
                self.settle()
            held = self._held()
            if self.recorder is not None and phase is not Phase.STEP:
                self.recorder.moment(phase, label, touches, held, rows)
            actions = self._within_bounds(phase, label, touches, held, rows)
            stretch = self.pilot.stretch
            ledger = self.mover.ledger
            self.mover.store.limit_slots = self.pilot.capacity_slots
            now = self._nonmodel_now(stretch)
            # What is alive between two moments is part of both.
            ledger.nonmodel(self._compute, now if self.meter is not None else min(now, self._nonmodel_before))
            if actions:
                self.mover.carry_out(actions)
            self.mover.store.trim()
            if rows is not None:
                ledger.move(*link_of(rows), rows.nbytes)
            ledger.begin_moment({self._compute: now})
            self._nonmodel_before = now
            for touch in touches:
                if touch.writes:
                    self.mover.wrote(touch.ref)

    def change_phase(self) -> Phase:
        """What a change in place that has just been noticed is part of: of a stretch that is recorded or goes as planned, or of none."""
        if backward_id() != -1:
            return Phase.RECOMPUTE
        stretch = self.pilot.stretch
        is_known = self.recorder is not None or (stretch.planned and not stretch.complete)
        return Phase.FORWARD if is_known else Phase.STEP

    @contextmanager
    def making(self, nbytes: int) -> Iterator[None]:
        """A tensor of so many bytes is being filled: the moments in between leave room for it."""
        stretch = self.pilot.stretch
        stretch.reserve_bytes += nbytes
        self._making_bytes += nbytes
        try:
            yield
        finally:
            stretch.reserve_bytes -= nbytes
            self._making_bytes -= nbytes

    @contextmanager
    def rising(self, nbytes: int) -> Iterator[None]:
        """The same for a tensor that the budget counts by itself: only the process grows by it."""
        self._making_bytes += nbytes
        try:
            yield
        finally:
            self._making_bytes -= nbytes

    def _within_bounds(
        self,
        phase: Phase,
        label: str,
        touches: Sequence[Touch],
        held: Collection[PlaneRef],
        rows: Rows | None,
    ) -> Sequence[Action]:
        """What must happen before the moment, and does not make the process too large."""
        actions = self.pilot.actions(phase, label, touches, held, rows)
        if self.arena is not None:
            in_use = self._slots_in_use(actions)
            excess = self.arena.excess_bytes(in_use * self.mover.state.slot_bytes)
            if excess:
                self.pilot.yield_bytes(excess, slots=in_use)
                actions = self.pilot.decided(phase, label, touches, held, rows)
                self.arena.expect_room(self._slots_in_use(actions) * self.mover.state.slot_bytes)
        if self._pressure is None:
            return actions
        in_use = self._slots_in_use(actions)
        slots = max(
            in_use, min(self.mover.store.committed_slots, self.pilot.capacity_slots)
        )  # those that will hold pages
        growth = (slots - self.mover.store.committed_slots) * self.mover.state.slot_bytes + self._rise_bytes()
        excess = self._pressure.excess_bytes(growth)
        if not excess:
            return actions
        self.pilot.yield_bytes(excess, slots=slots)
        return self.pilot.decided(phase, label, touches, held, rows)

    def _slots_in_use(self, actions: Sequence[Action]) -> int:
        """How many slots will be in use once these actions are done."""
        in_use = self.mover.state.slots_used
        for action in actions:
            match action:
                case Create(_, tier, slots) | Copy(_, _, tier, slots) if tier is self._compute:
                    in_use += slots
                case Drop(_, tier, slots) if tier is self._compute:
                    in_use -= slots
        return in_use

    def _rise_bytes(self) -> int:
        """By how much what is alive beside the slots grows until the next moment, as far as that is known."""
        stretch, rise = self.pilot.stretch, self._making_bytes
        if stretch.planned and stretch.trace is not None and stretch.position > 1:
            now, before = (stretch.trace.moments[stretch.position - back].nonmodel_bytes for back in (1, 2))
            rise += max(0, now - before)
        return rise

    def _nonmodel_now(self, stretch: Stretch) -> int:
        """Bytes of non-model data: as metered, else as the trace has it, else what is reserved for it."""
        if self.meter is not None:
            return self.meter.live
        return self._nonmodel_at(stretch, stretch.position - 1)

    def _nonmodel_at(self, stretch: Stretch, index: int) -> int:
        if stretch.planned and stretch.trace is not None and stretch.trace.moments:
            return stretch.trace.moments[index].nonmodel_bytes
        return stretch.reserve_bytes if stretch.trace is not None else 0

    def tensor(self, ref: PlaneRef) -> Tensor:
        """A 1-D tensor over a resident unit, on a storage of its own. Valid until the next moment unless a lease is taken."""
        with torch.inference_mode(False):
            return self.mover.store.tensor(ref, self._compute)

    def tensor_at_home(self, ref: PlaneRef) -> Tensor:
        """A 1-D tensor over a unit that rests on the host, at a moment that uses rows of it."""
        with torch.inference_mode(False):
            return self.mover.store.tensor(ref, Tier.HOST)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """As `quiet`, and not counted: copies handed to the user as host memory, a kernel's few scalars."""
        meter = self.meter
        counted = meter is not None and meter.counts
        if meter is not None:
            meter.counts = False
        try:
            with self.quiet():
                yield
        finally:
            if meter is not None:
                meter.counts = counted

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Our own tensor operations: no gradients, no inference tensors, no subclasses."""
        with torch.inference_mode(False), torch.no_grad(), Plain():
            yield
