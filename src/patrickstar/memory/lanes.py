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

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from threading import Lock
from typing import NamedTuple, Protocol

from patrickstar.errors import DeviceError, StateError

_LATEST_SECONDS = 2e-3

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


class ThreadTicket(Ticket):
    """The end of a work that a thread does."""

    def __init__(self, end: Future[None]) -> None:
        self._end = end

    @property
    def done(self) -> bool:
        return self._end.done()

    def wait(self) -> None:
        self._end.result()

    wait_until_settled = wait

    def when_settled(self, call: Callable[[], None]) -> None:
        self._end.add_done_callback(lambda _: call())


class ThreadLane:
    """A lane that does up to `works` works at once, each in a thread; threads are started when there is a work for them.

    A lane that is dropped without `close` does what was issued; its threads end then.
    """

    def __init__(self, name: str, *, works: int = 1) -> None:
        self.name = name
        self._workers = Workers(name, works)
        weakref.finalize(self, self._workers.stop, waits=False).atexit = False  # the workers see to that
        self._ends: set[Future[None]] = set()
        self._lock = Lock()
        self._process = os.getpid()

    def issue(self, work: Task, after: Collection[Ticket] = (), *, nbytes: int = 0) -> Ticket:  # noqa: ARG002
        end: Future[None] = Future()
        with self._lock:
            self._ends.add(end)
        end.add_done_callback(self._forget)
        before = tuple(after)  # the caller may go on with its own
        when_all_settled(before, lambda: self._workers.submit(Job(work, before, end)))
        return ThreadTicket(end)

    def _forget(self, end: Future[None]) -> None:
        with self._lock:
            self._ends.discard(end)

    def drain(self) -> None:
        while os.getpid() == self._process:  # a forked child has no such threads, and nothing to wait for
            with self._lock:
                ends = set(self._ends)
            if not ends:
                return
            wait(ends)

    def close(self) -> None:
        self.drain()
        self._workers.stop()


class PacedLane(ThreadLane):
    """A lane that takes as long as a link of some speed would: one transfer after another, asleep for what is left of its time.

    `bytes_per_second`: of the link, in this direction.
    """

    def __init__(self, name: str, *, bytes_per_second: float) -> None:
        super().__init__(name)
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    def issue(self, work: Task, after: Collection[Ticket] = (), *, nbytes: int = 0) -> Ticket:
        ready_at = 0.0

        def note() -> None:
            nonlocal ready_at
            ready_at = time.monotonic()

        def paced() -> None:
            # From when it could begin, not from when its thread woke up: sleeps are a little too long, and must not add up.
            self._free_at = max(self._free_at, ready_at) + nbytes / self._bytes_per_second
            work()
            left = self._free_at - time.monotonic()
            if left > 0:
                time.sleep(left)

        when_all_settled(after, note)
        return super().issue(paced, after)


class StressedLane:
    """Has another lane do its works, each a random time later than that would, so that whoever does not wait finds something else."""

    def __init__(self, lane: Lane, random: Random) -> None:
        self._lane, self._random = lane, random
        self.drain, self.close = lane.drain, lane.close

    def issue(self, work: Task, after: Collection[Ticket] = (), *, nbytes: int = 0) -> Ticket:
        # Most are late by a little, some by much.
        seconds = _LATEST_SECONDS * self._random.random() ** 3

        def late() -> None:
            time.sleep(seconds)
            work()

        return self._lane.issue(late, after, nbytes=nbytes)


class Job(NamedTuple):
    """A work to be done once, what it comes after, and its end."""

    work: Task
    after: Collection[Ticket]
    end: Future[None]

    def do(self, lane: str) -> None:
        """Does it, and raises nothing."""
        try:
            error = end_of(self.work, self.after).error
        except BaseException as ending:  # what ends a thread is no interruption of whoever waits
            error = DeviceError(f"a work of the lane {lane} was ended by {ending!r}")
            error.__cause__ = ending
        if error is None:
            self.end.set_result(None)
        else:
            self.end.set_exception(error)

    def fail(self, error: Exception) -> None:
        """Is told why it will not be done, or is not known to have been."""
        with suppress(InvalidStateError):  # it is over
            self.end.set_exception(error)


class Workers:
    """Threads, up to `count` of them, started when there is a job for them.

    A thread may be ended by anybody, at any time: what it was doing then has failed, and what is left in the queue is done by another one. Where
    nobody has stopped them by the end of the program, the queue is emptied first.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._taken: dict[threading.Thread, Job | None] = {}  # by thread that has been started: what it is doing
        self._stopped = False
        self._process = os.getpid()
        atexit.register(self.stop)  # until they are stopped

    def submit(self, job: Job) -> None:
        """Has a job done, or fail where they are stopped."""
        with self._changed:
            is_stopped = self._stopped
            if not is_stopped:
                self._jobs.append(job)
                self._changed.notify()
        if is_stopped:
            job.fail(StateError(f"the lane {self._name} does nothing any more: it is closed"))
        elif len(self._taken) < self._count:
            self._start()

    def stop(self, *, waits: bool = True) -> None:
        """Ends the threads, once the queue is empty, and waits for that, if it is to."""
        atexit.unregister(self.stop)
        if os.getpid() != self._process:  # a forked child has no such threads, and perhaps a lock that one of them held
            return
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            threads = list(self._taken)
        for thread in threads if waits else ():
            if thread is not threading.current_thread():
                thread.join()

    def _start(self) -> None:
        """Starts a thread where one is wanted: all there are have something to do."""
        with self._changed:
            idle = sum(job is None for job in self._taken.values())
            if len(self._taken) == self._count or idle >= len(self._jobs):
                return
            # As a daemon: a thread that waits for jobs keeps no program from its end.
            name = f"patrickstar {self._name}_{len(self._taken)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._taken[thread] = None
            try:
                thread.start()
            except RuntimeError as error:
                del self._taken[thread]
                lost = [] if self._taken else list(self._jobs)
                why = DeviceError(f"the lane {self._name} does nothing any more: {error}")
            else:
                return
            for _ in lost:
                self._jobs.popleft()
        for job in lost:
            job.fail(why)

    def _work(self) -> None:
        me = threading.current_thread()
        try:
            while (job := self._next(me)) is not None:
                job.do(self._name)
        finally:
            self._end(me)

    def _next(self, me: threading.Thread) -> Job | None:
        with self._changed:
            self._taken[me] = None
            while not self._jobs and not self._stopped:
                self._changed.wait()
            if not self._jobs:
                return None
            # Noted before it is taken: it has an owner all the time.
            self._taken[me] = self._jobs[0]
            return self._jobs.popleft()

    def _end(self, me: threading.Thread) -> None:
        with self._changed:
            job = self._taken.pop(me, None)
        if job is not None:
            job.fail(DeviceError(f"the thread of the lane {self._name} was ended while it was doing this"))
        if self._jobs:
            self._start()
