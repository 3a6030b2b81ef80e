"""Lanes do works; tickets are what to wait on.

(1) A work begins when all that it comes after has ended. By that works are ordered, and by nothing else: several of one lane may be under way,
    and they may end in any order.
(2) `issue` never raises what the work raises: `wait` does, each time, at the place where the bytes are needed.
(3) A work that comes after one that failed is not done: it fails with the same error.
(4) After `wait` the work has ended, once. A ticket stays done.
(5) After `drain` nothing is under way. After `close` nothing is either, and what is issued then fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from patrickstar.errors import StateError

__all__ = ["DONE", "CompletedTicket", "InlineLane", "Lane", "Ticket", "Work", "end_of"]

Work = Callable[[], None]
"""What a lane does: a transfer, or the filling of slots. May raise."""


class Ticket(Protocol):
    """One issued work."""

    @property
    def done(self) -> bool:
        """True once the work has ended, well or not."""

    def wait(self) -> None:
        """Returns when the work has ended, or raises what it raised."""

    def when_done(self, call: Callable[[], None]) -> None:
        """Has something called once the work has ended, by whichever thread ends it; at once where it has. It is short and raises nothing."""


class Lane(Protocol):
    """A road for works, such as the transfers of one link in one direction."""

    def issue(self, work: Work, after: Collection[Ticket] = (), *, nbytes: int = 0) -> Ticket:
        """Has a work done that moves so many bytes, after these others; gives the ticket to wait on."""

    def drain(self) -> None:
        """Waits until nothing is under way. What failed stays with its ticket."""

    def close(self) -> None:
        """Drains the lane, and ends it."""


@dataclass(frozen=True, slots=True)
class CompletedTicket:
    """A work that has ended."""

    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self.error is not None:
            raise self.error

    def when_done(self, call: Callable[[], None]) -> None:
        call()


DONE = CompletedTicket()
"""Of nothing that had to be done."""


class InlineLane:
    """A lane that does a work at issue, in the caller's thread."""

    def __init__(self) -> None:
        self._closed = False

    def issue(self, work: Work, after: Collection[Ticket] = (), *, nbytes: int = 0) -> CompletedTicket:  # noqa: ARG002
        return CompletedTicket(StateError("the lane is closed")) if self._closed else end_of(work, after)

    def drain(self) -> None:
        pass

    def close(self) -> None:
        self._closed = True


def end_of(work: Work, after: Collection[Ticket]) -> CompletedTicket:
    """Does a work now, once those before it have ended; how that ended. An interruption by the user is none of the work, and raised."""
    try:
        for ticket in after:
            ticket.wait()
        work()
    except Exception as error:
        return CompletedTicket(error)
    return DONE
