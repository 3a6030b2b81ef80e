"""File calls that fail on demand, for tests of what happens then."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from patrickstar.memory.fileio import FileIO


@dataclass(frozen=True, slots=True)
class Fails:
    """A fault: the `nth` use of a call, counted from 1, and the `times - 1` after it, raise `OSError` with an error number.

    `Fails("pwritev", errno.ENOSPC, nth=3)`; with `errno.EINTR` it is an interrupted call.
    """

    call: str
    number: int
    nth: int = 1
    times: int = 1


@dataclass(frozen=True, slots=True)
class Short:
    """A fault: the `nth` transfer, and the `times - 1` after it, move at most `nbytes`; with 0 nothing, as at a file's end."""

    call: str
    nbytes: int
    nth: int = 1
    times: int = 1


class FaultyIO(FileIO):
    """The real calls, on real files, with the given faults. `counts` has the uses of each call so far."""

    def __init__(self, *faults: Fails | Short) -> None:
        self.faults = list(faults)

        self.counts: Counter[str] = Counter()
        self.hit: list[Fails | Short] = []
        for call in vars(FileIO):
            if not call.startswith("_"):
                setattr(self, call, partial(self._call, call))

    def _call(self, call: str, *arguments: Any) -> Any:
        act = getattr(super(), call)
        if call == "close":
            act(*arguments)  # first: a close that reports an error has closed
        self.counts[call] += 1
        for fault in self.faults:
            if fault.call == call and fault.nth <= self.counts[call] < fault.nth + fault.times:
                self.hit.append(fault)
                if isinstance(fault, Fails):
                    raise OSError(fault.number, os.strerror(fault.number))
                fd, buffer, offset = arguments
                return act(fd, buffer[: fault.nbytes], offset) if fault.nbytes else 0
        return None if call == "close" else act(*arguments)
