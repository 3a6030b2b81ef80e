"""Threads that do works from one queue, and whose end is noticed."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from patrickstar.errors import DeviceError, StateError


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
