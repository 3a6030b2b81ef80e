"""Lanes run transfers in order; tickets are what to wait on.

(1) `issue` never raises what the work raises: `wait` does, at the place where the bytes are needed.
(2) The works of one lane run in the order of issue, one at a time.
(3) After `wait` the work has ended, once, and so has all that was issued on its lane before.
(4) A ticket stays done; waiting again gives the same end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["CompletedTicket", "InlineLane", "Lane", "Ticket"]


class Ticket(Protocol):
    """One issued transfer."""

    @property
    def done(self) -> bool:
        """True once the transfer has ended, well or not."""

    def wait(self) -> None:
        """Returns when the transfer has ended, or raises what the transfer raised."""


class Lane(Protocol):
    """An ordered stream of transfers."""

    def issue(self, work: Callable[[], None]) -> Ticket:
        """Has the work done after what was issued before; gives the ticket to wait on."""


@dataclass(frozen=True, slots=True)
class CompletedTicket:
    """A transfer that had ended when its ticket was made."""

    error: Exception | None = None

    @property
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


class InlineLane:
    """A lane that does the work at issue, in the caller's thread."""

    def issue(self, work: Callable[[], None]) -> CompletedTicket:
        try:
            work()
        except Exception as error:
            return CompletedTicket(error)
        return CompletedTicket()
