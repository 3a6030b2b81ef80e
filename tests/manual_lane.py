"""Lanes without threads whose works are done when they are told, or waited for: so that a race becomes a test of two orders.

Only the thread that waits does anything, or has it done: a work of a lane with threads that comes after one of these would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random
from threading import Thread

from patrickstar.errors import StateError
from patrickstar.memory.lanes import CompletedTicket, Task, Ticket, end_of


class ManualLane:
    """Keeps what is issued until `complete` or a `wait`: bytes that are used before their wait are not there yet.

    What a ticket is waited for is done first, and nothing else but what it comes after.
    """

    def __init__(self) -> None:
        self._pending: list[ManualTicket] = []
        self._closed = False

    @property
    def pending(self) -> int:
        """Works issued and not yet done."""
        return len(self._pending)

    def issue(self, work: Task, after: Collection[Ticket] = (), *, nbytes: int = 0) -> Ticket:
        if self._closed:
            return CompletedTicket(StateError("the lane is closed"))
        ticket = ManualTicket(self, work, tuple(after))
        self._pending.append(ticket)
        return ticket

    def complete(self, n: int = 1) -> None:
        """Does the `n` works that were issued first."""
        assert n <= len(self._pending), f"{n} works are to be done, {len(self._pending)} are pending"
        for ticket in self._pending[:n]:
            self.do(ticket)

    def wait_for(self, ticket: ManualTicket) -> None:
        """Does what must be done for a ticket to be done."""
        self.do(ticket)

    def do(self, ticket: ManualTicket) -> None:
        """Does one work now, and those of other tickets that it comes after."""
        if not ticket.done:
            self._pending.remove(ticket)
            ticket.end()

    def drain(self) -> None:
        while self._pending:
            self.wait_for(self._pending[-1])

    def close(self) -> None:
        self.drain()
        self._closed = True


class RandomLane(ManualLane):
    """A lane that does some other works in a random order before one that is waited for: who takes an order for granted is found out.

    `works`: done at once, each in a thread, of those that come after nothing that is still to be done.
    """

    def __init__(self, random: Random, *, works: int = 1) -> None:
        super().__init__()
        self._random = random
        self._works = works

    def wait_for(self, ticket: ManualTicket) -> None:
        while not ticket.done:
            ready = [one for one in self._pending if one.ready] if self._works > 1 else []
            if len(ready) > 1:
                self._do_at_once(self._random.sample(ready, min(self._works, len(ready))))
            else:
                self.do(self._random.choice(self._pending))

    def _do_at_once(self, tickets: list[ManualTicket]) -> None:
        for ticket in tickets:
            self._pending.remove(ticket)
        threads = [Thread(target=ticket.end) for ticket in tickets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class ManualTicket(Ticket):
    """A work of a `ManualLane`."""

    def __init__(self, lane: ManualLane, work: Task, after: Collection[Ticket]) -> None:
        self._lane = lane

        self._work: Task | None = work
        self._after = after
        self._end: CompletedTicket | None = None
        self._calls: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        return self._end is not None

    @property
    def ready(self) -> bool:
        """Tells whether all that it comes after is done."""
        return all(ticket.done for ticket in self._after)

    def wait(self) -> None:
        if self._end is None:
            self._lane.wait_for(self)
        assert self._end is not None
        self._end.wait()

    def when_settled(self, call: Callable[[], None]) -> None:
        if self._end is None:
            self._calls.append(call)
        else:
            call()

    def end(self) -> None:
        """Does the work."""
        assert self._work is not None
        self._end = end_of(self._work, self._after)
        self._work, self._after = None, ()  # what it moved is not kept alive by a ticket
        for call in self._calls:
            call()
