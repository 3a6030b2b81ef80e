"""Lanes whose works are done by threads, beside the caller: freely, as a link of some speed would, or each late by chance."""

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

from patrickstar.errors import DeviceError, StateError
from patrickstar.memory.lanes import Lane, Task, Ticket, when_all_settled

_LATEST_SECONDS = 2e-3


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
        when_all_settled(before, lambda: self._start(work, before, end))
        return ThreadTicket(end)

    def _start(self, work: Task, after: Collection[Ticket], end: Future[None]) -> None:
        def fail(error: Exception) -> None:
            with suppress(InvalidStateError):  # it is over
                end.set_exception(error)

        name = self.name
        self._workers.submit(Job(lambda: _do(work, after, end, name), fail))

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


def _do(work: Task, after: Collection[Ticket], end: Future[None], lane: str) -> None:
    try:
        for ticket in after:
            ticket.wait()
        work()
    except Exception as error:
        end.set_exception(error)
    except BaseException as error:  # what ends a thread is no interruption of whoever waits
        failure = DeviceError(f"a work of the lane {lane} was ended by {error!r}")
        failure.__cause__ = error
        end.set_exception(failure)
    else:
        end.set_result(None)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Something to be done once. `do` does it, and raises nothing. `fail`: is told why it will not be done, or is not known to have been."""

    do: Callable[[], None]
    fail: Callable[[Exception], None]


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
                job.do()
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
