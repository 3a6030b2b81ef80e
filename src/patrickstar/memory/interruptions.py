"""Ctrl-C, put off until bytes and what is noted of them agree again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType


@contextmanager
def interruptions_put_off() -> Iterator[None]:
    """A context in which SIGINT waits until the end of what is done, which must be short: whoever has asked for the signal gets it then.

    Only the main thread is interrupted by signals; in others, and where nobody in Python has asked for the signal, nothing changes;
    nor does it inside of another one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(handler) or (isinstance(handler, partial) and handler.func is _note):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, partial(_note, came))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])


def _note(came: list[tuple[int, FrameType | None]], number: int, frame: FrameType | None) -> None:
    came.append((number, frame))
