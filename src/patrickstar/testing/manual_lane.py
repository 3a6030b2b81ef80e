"""A lane whose transfers complete when told, so that a race becomes a test of two orders."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from patrickstar.memory.lanes import CompletedTicket

__all__ = ["ManualLane", "ManualTicket"]


class ManualLane:
    """Keeps what is issued until `complete` or a `wait`: bytes that are used before their wait are not there yet."""

    def __init__(self) -> None:
        self._pending: deque[ManualTicket] = deque()

    @property
    def pending(self) -> int:
        """Transfers issued and not yet run."""
        return len(self._pending)

    def issue(self, work: Callable[[], None]) -> ManualTicket:
        ticket = ManualTicket(self, work)
        self._pending.append(ticket)
        return ticket

    def complete(self, n: int = 1) -> None:
        """Run the `n` transfers that were issued first."""
        assert n <= len(self._pending), f"{n} transfers are to complete, {len(self._pending)} are pending"
        for _ in range(n):
            self._pending.popleft()._run()


class ManualTicket:
    """A transfer of a `ManualLane`."""

    def __init__(self, lane: ManualLane, work: Callable[[], None]) -> None:
        self._lane = lane

        self._work: Callable[[], None] | None = work
        self._end: CompletedTicket | None = None

    @property
    def done(self) -> bool:
        return self._end is not None

    def wait(self) -> None:
        """Run the lane up to this transfer, as a stream would have by the time a wait for it returns."""
        while self._end is None:
            self._lane.complete()
        self._end.wait()

    def _run(self) -> None:
        assert self._work is not None
        try:
            self._work()
        except Exception as error:
            self._end = CompletedTicket(error)
        else:
            self._end = CompletedTicket()
        self._work = None  # what it moved is not kept alive by a ticket
