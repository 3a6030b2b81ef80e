"""Ctrl-C and SIGTERM: at once while nothing is at stake, after the running step while there is.

preparing, summing up    a signal raises `Stopped`
inside `deferring()`     the first signal is noted in `requested`, the second raises `Stopped`
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """Somebody asked us to stop: not an error, so no `except Exception` may swallow it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"stopped, exit status {status}")
        self.status = status


class StopSignals(ExitStack):
    """The handlers of both signals, for the duration of a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.requested: int | None = None
        """The exit status that a signal received inside `deferring()` asks for."""
        self._deferred: Callable[[str], None] | None = None

    def __enter__(self) -> StopSignals:
        # Python runs handlers in the main thread only; elsewhere whoever owns that thread decides what a signal does.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self.callback(signal.signal, number, signal.signal(number, self._receive))
        return self

    @contextmanager
    def deferring(self, say: Callable[[str], None]) -> Iterator[None]:
        """A context inside which the first signal only sets `requested` and says so; whoever runs the steps looks there after each."""
        self._deferred = say
        try:
            yield
        finally:
            self._deferred = None

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        status = 128 + number  # what a shell reports for a process that the signal ended
        if self._deferred is None or self.requested is not None:
            raise Stopped(status)
        self.requested = status
        self._deferred("stopping after this step; once more stops at once")
