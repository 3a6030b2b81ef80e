"""Ctrl-C, put off until bytes and what is noted of them agree again."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from signal import SIGINT
from types import FrameType
from typing import Any

_signal: Any = import_module("_signal")  # in `signal` each function makes enumerations of all that it is given


@dataclass(frozen=True, slots=True)
class InterruptionsPutOff:
    """A context in which SIGINT waits until the end of what is done, which must be short: whoever has asked for the signal gets it then.

    Only the main thread is interrupted by signals; in others, and where nobody in Python has asked for the signal, nothing changes;
    nor does it inside of another one.
    """

    _handler_and_came: list[Any] = field(default_factory=list)

    def __enter__(self) -> None:
        handler = _signal.getsignal(SIGINT)
        if callable(handler) and not (isinstance(handler, partial) and handler.func is _note):
            try:
                _signal.signal(SIGINT, partial(_note, self._handler_and_came))
            except ValueError:  # in another thread
                return
            self._handler_and_came.insert(0, handler)

    def __exit__(self, *_: object) -> None:
        if self._handler_and_came:
            handler = self._handler_and_came[0]
            _signal.signal(SIGINT, handler)
            if len(self._handler_and_came) > 1:
                handler(*self._handler_and_came[-1])


def _note(came: list[Any], number: int, frame: FrameType | None) -> None:
    came.append((number, frame))
