"""Ctrl-C, put off until bytes and what is noted of them agree again."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["InterruptionsPutOff"]


class InterruptionsPutOff:
    """A context in which SIGINT waits until the end of what is done, which must be short: whoever has asked for the signal gets it then.

    Only the main thread is interrupted by signals; in others, and where nobody in Python has asked for the signal, nothing changes;
    nor does it inside of another one.
    """

    __slots__ = ("_came", "_handler")

    def __enter__(self) -> None:
        self._handler: Any = None
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler) or isinstance(getattr(handler, "__self__", None), InterruptionsPutOff):
            return
        self._came: list[tuple[int, FrameType | None]] = []
        self._handler = handler
        signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._came:
            self._handler(*self._came[-1])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))
