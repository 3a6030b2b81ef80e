"""Switches the meter of live bytes on and off around steps, and holds it against the budget where that is a hard bound."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from patrickstar.core.machine import Tier
from patrickstar.errors import BudgetError
from patrickstar.step.executor import Executor
from patrickstar.tracing.live_bytes import LiveBytes
from patrickstar.units import format_bytes

__all__ = ["Metering"]


class Metering:
    """The meter of one session.

    It counts from the beginning of a forward to the end of its backward, and is left when the next stretch of the step begins.

    Args:
        is_slot: whether a tensor lies over a slot. bounded: whether chunks leave where slots and live bytes together would exceed the budget.
            enforce: whether it is an error where that does not help.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        compute: Tier,
        budget_bytes: Callable[[], int],
        is_slot: Callable[[Tensor], bool],
        bounded: bool,
        enforce: bool,
    ) -> None:
        self._executor = executor
        self._compute = compute
        self._budget_bytes = budget_bytes
        self._is_slot = is_slot
        self._bounded = bounded
        self._enforce = enforce

        self._meter: LiveBytes | None = None
        self._acts = True

    def start(self, *, acts: bool = True) -> Callable[[], int]:
        """Switches the meter on; gives the function that restarts its peak. `acts`: whether chunks may leave for what it counts."""
        self._acts = acts
        meter = LiveBytes(self._is_slot, self._on_change)
        meter.__enter__()
        self._meter = meter
        self._executor.meter = meter
        self._executor.arena = self if self._enforce else None
        return meter.restart_peak

    def pause(self) -> None:
        """What is made from now on is no part of the step. (A mode cannot be left from inside a backward call.)"""
        if self._meter is not None:
            self._meter.counts = False
            self._executor.meter = self._executor.arena = None
            self._executor.mover.ledger.nonmodel(self._compute, 0)

    def stop(self) -> None:
        """Switches it off."""
        meter, self._meter = self._meter, None
        if meter is None:
            LiveBytes.leave_retired()
            return
        self._executor.meter = self._executor.arena = None
        self._executor.mover.ledger.nonmodel(self._compute, 0)
        meter.retire()

    def excess_bytes(self, slot_bytes: int) -> int:
        """By how much slots and live bytes would exceed the budget, with so many bytes of slots in use."""
        if self._meter is None or LiveBytes.is_shared():
            return 0
        return max(0, slot_bytes + self._meter.live - self._budget_bytes())

    def expect_room(self, slot_bytes: int) -> None:
        """BudgetError where they would."""
        if self.excess_bytes(slot_bytes):
            assert self._meter is not None
            self._refuse(slot_bytes, self._meter.live)

    def _on_change(self, live: int) -> None:
        ledger = self._executor.mover.ledger
        if self._bounded and self._acts and self.excess_bytes(ledger.chunks(self._compute)):
            # More than was foreseen: chunks that nothing uses right now leave, which is said, and only then it is an error.
            self._executor.make_way(self._budget_bytes() - live)
            if self._enforce:
                self.expect_room(ledger.chunks(self._compute))
        ledger.nonmodel(self._compute, live)

    def _refuse(self, slot_bytes: int, live: int) -> None:
        held, budget, stretch = slot_bytes + live, self._budget_bytes(), self._executor.pilot.stretch
        # Where there is no forecast, or it has just been shown to be wrong, nobody knows what is still to come: a quarter more is an estimate.
        smallest = held + held // 4
        self.pause()  # this step is over
        raise BudgetError(
            f"{self._compute.label} memory of {format_bytes(budget)} is exceeded at moment {stretch.position} of the {stretch.name}: "
            f"{format_bytes(held)} = chunk slots {format_bytes(slot_bytes)} + activations {format_bytes(live)}\n"
            f"  give {self._compute.label}_memory >= {format_bytes(smallest)}, or a smaller batch",
            tier=self._compute.label,
            moment=f"{stretch.position} {stretch.name}",
            needed_bytes=held,
            available_bytes=budget,
            smallest_bytes=smallest,
        )
