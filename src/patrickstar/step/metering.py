"""Switches the meter of live bytes on and off around steps."""

from __future__ import annotations

from collections.abc import Callable

from patrickstar.step.executor import Executor
from patrickstar.tracing.live_bytes import LiveBytes

__all__ = ["Metering"]


class Metering:
    """The meter of one session. It counts from the beginning of a forward to the end of its backward, and is left when the next stretch begins."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

        self._meter: LiveBytes | None = None

    def start(self, *, acts: bool = True) -> Callable[[], int]:
        """Switches the meter on; gives the function that restarts its peak. `acts`: whether chunks may leave for what it counts."""
        meter = LiveBytes(self._executor.store.leases.is_counted, self._executor.live_changed)
        meter.__enter__()
        self._meter = self._executor.meter = meter
        self._executor.meter_acts = acts
        return meter.restart_peak

    def pause(self) -> None:
        """What is made from now on is no part of the step. (A mode cannot be left from inside a backward call.)"""
        if self._meter is not None:
            self._executor.unmeter()

    def stop(self) -> None:
        """Switches it off."""
        meter, self._meter = self._meter, None
        if meter is None:
            LiveBytes.leave_retired()
            return
        self._executor.unmeter()
        meter.retire()
