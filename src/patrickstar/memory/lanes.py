"""Lanes do works; tickets are what to wait on.

(1) A work begins when all that it comes after has ended. By that works are ordered, and by nothing else: several of one lane may be under way,
    and they may end in any order.
(2) `issue` never raises what the work raises: `wait` does, each time, at the place where the bytes are needed.
(3) A work that comes after one that failed is not done: it fails with the same error.
(4) After `wait` the work has ended, once. A ticket stays done.
(5) After `drain` nothing is under way. After `close` nothing is either, and what is issued then fails.
(6) Works of a device's stream are queued there, and nobody need wait on the host for them: `wait_on_device` has the device wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from patrickstar.errors import StateError

Task = Callable[[], None]
"""What a lane does: a transfer, or the filling of slots. May raise."""


class Ticket(Protocol):
    """One issued work."""

    @property
    def done(self) -> bool:
        """True once the work has ended, well or not."""

    def wait(self) -> None:
        """Returns when the work has ended, or raises what it raised."""

    def wait_until_settled(self) -> None:
        """Returns when the work has ended, or is queued on a device; raises what it raised, as far as that is known."""
        self.wait()

    def wait_on_device(self) -> None:
        """Has all that this thread queues on its stream of the device from now on come after the work. Other works are waited for.

        Raises what the work raised, as far as that is known.
        """
        self.wait()

    def when_settled(self, call: Callable[[], None]) -> None:
        """Has something called once the work has ended, or is queued on a device; at once where it is. The call is short and raises nothing.

        It is made by whichever thread ends or queues the work.
        """


class Lane(Protocol):
    """A road for works, such as the transfers of one link in one direction."""

    def issue(self, work: Task, after: Collection[Ticket] = (), *, nbytes: int = 0) -> Ticket:
        """Has a work done that moves so many bytes, after these others; gives the ticket to wait on."""

    def drain(self) -> None:
        """Waits until nothing is under way. What failed stays with its ticket."""

    def close(self) -> None:
        """Drains the lane, and ends it."""


@dataclass(frozen=True)
class CompletedTicket(Ticket):
    """A work that has ended."""

    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self.error is not None:
            raise self.error

    wait_until_settled = wait

    def when_settled(self, call: Callable[[], None]) -> None:
        call()


DONE = CompletedTicket()
"""Of nothing that had to be done."""


def when_all_settled(tickets: Collection[Ticket], call: Callable[[], None]) -> None:
    """Calls once all of these works have ended, or are queued on a device."""
    if not tickets:
        call()
        return
    # A ticket that is kept keeps what it was to call: not the works that came after it, and what those use.
    lock, left, calls = Lock(), len(tickets) + 1, [call]

    def one_less() -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            calls.pop()()

    for ticket in tickets:
        ticket.when_settled(one_less)
    one_less()


class InlineLane:
    """A lane that does a work at issue, in the caller's thread."""

    def __init__(self) -> None:
        self._closed = False

    def issue(self, work: Task, after: Collection[Ticket] = (), *, nbytes: int = 0) -> CompletedTicket:  # noqa: ARG002
        return CompletedTicket(StateError("the lane is closed")) if self._closed else end_of(work, after)

    def drain(self) -> None:
        pass

    def close(self) -> None:
        self._closed = True


def end_of(work: Task, after: Collection[Ticket]) -> CompletedTicket:
    """Does a work now, once those before it have ended; how that ended. An interruption by the user is none of the work, and raised."""
    try:
        for ticket in after:
            ticket.wait()
        work()
    except Exception as error:
        return CompletedTicket(error)
    return DONE
