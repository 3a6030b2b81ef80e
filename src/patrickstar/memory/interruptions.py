"""Ctrl-C, put off until bytes and what is noted of them agree again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interruptions_put_off"]


@contextmanager
def interruptions_put_off() -> Iterator[None]:
    """Has SIGINT wait until the end of what is done in here, which must be short: whoever has asked for the signal gets it then.

    Only the main thread is interrupted by signals; in others, and where nobody in Python has asked for the signal, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])
