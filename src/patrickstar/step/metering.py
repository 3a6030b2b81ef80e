"""Metering of live bytes, switched on and off around steps."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from patrickstar.memory.leases import Leases
from patrickstar.step.executor import Executor
from patrickstar.tracing.live_bytes import LiveBytes

__all__ = ["Metering"]


class Metering:
    """The meter of one session. Counts from the beginning of a forward to the end of its backward; the meter is left when the next stretch begins.

    It is left too when a session is dropped in the middle of a step, without being closed. `on_device`: as for `LiveBytes`.
    """

    def __init__(self, executor: Executor, *, on_device: bool = False) -> None:
        self._executor = executor
        self._on_device = on_device

        self._meter: LiveBytes | None = None
        self._abandoned: weakref.finalize[Any, Any] | None = None

    def start(self, *, acts: bool = True) -> LiveBytes:
        """Switches the meter on, which it gives. `acts`: whether chunks may leave for what it counts."""
        # torch holds a mode that is on: through it, it must not hold a session that everybody else has dropped.
        leases, executor = weakref.proxy(self._executor.store.leases), weakref.proxy(self._executor)
        is_slot, at_change = partial(Leases.is_counted, leases), partial(Executor.live_changed, executor)
        meter = LiveBytes(is_slot, at_change, on_device=self._on_device)
        meter.switch_on()
        self._abandoned = weakref.finalize(self, meter.retire)
        self._abandoned.atexit = False
        self._meter = self._executor.meter = meter
        self._executor.meter_acts = acts
        return meter

    def pause(self) -> None:
        """Stops counting: what is made from now on is no part of the step. (A mode cannot be left from inside a backward call.)"""
        if self._meter is not None:
            self._executor.unmeter()

    def stop(self) -> None:
        """Switches the meter off."""
        meter, self._meter = self._meter, None
        if meter is None:
            LiveBytes.leave_retired()
            return
        if self._abandoned is not None:
            self._abandoned.detach()
        self._executor.unmeter()
        meter.retire()
