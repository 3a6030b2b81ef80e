"""A lane whose works are queued on a stream of the device, which does them beside the host and beside its other streams."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from threading import Condition, RLock

import torch

from patrickstar.errors import StateError
from patrickstar.memory.device_failure import DeviceFailureError
from patrickstar.memory.lanes import CompletedTicket, Task, Ticket, when_all_settled


class StreamTicket:
    """A work that the device does, known by an event behind it on its stream. `stream`: ended when all is that it has now, where given."""

    def __init__(self, stream: torch.Stream | None = None) -> None:
        self._changed = Condition()
        self._event: torch.Event | None = None
        self._end: CompletedTicket | None = None
        self._calls: list[Callable[[], None]] = []
        if stream is not None:
            try:
                self._event = stream.record_event()
            except torch.AcceleratorError as error:
                # Nothing runs there any more: slots may be given back, and what comes after this fails.
                self._end = CompletedTicket(DeviceFailureError(error))

    def settle(self, how: torch.Event | BaseException) -> None:
        """Notes the event behind the work, or why it is not queued."""
        with self._changed:
            if isinstance(how, torch.Event):
                self._event = how
            else:
                self._end = CompletedTicket(how)
            self._changed.notify_all()
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    @property
    def done(self) -> bool:
        if self._end is None and self._event is not None:
            try:
                if self._event.query():
                    self._end = CompletedTicket()
            except torch.AcceleratorError as error:
                self._end = CompletedTicket(DeviceFailureError(error))
        return self._end is not None

    def wait(self) -> None:
        event = self._settled()
        if self._end is None and event is not None:
            try:
                event.synchronize()
            except torch.AcceleratorError as error:
                self._end = CompletedTicket(DeviceFailureError(error))
            else:
                self._end = CompletedTicket()
        assert self._end is not None
        self._end.wait()

    def wait_until_settled(self) -> None:
        self._settled()
        if self._end is not None:
            self._end.wait()

    def wait_on_device(self) -> None:
        event = self._settled()
        if self._end is not None:
            self._end.wait()
        elif event is not None:
            torch.accelerator.current_stream(event.device).wait_event(event)

    def _settled(self) -> torch.Event | None:
        if self._event is None and self._end is None:
            with self._changed:
                self._changed.wait_for(lambda: self._event is not None or self._end is not None)
        return self._event

    def when_settled(self, call: Callable[[], None]) -> None:
        with self._changed:
            if self._event is None and self._end is None:
                self._calls.append(call)
                return
        call()


class StreamLane:
    """A lane of one stream, whose works queue operations and never wait for them.

    A work is queued once what it comes after has ended on the host or is queued on the device: by the caller, or by the thread that ends the last
    of these. It may not wait for the device.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.stream = torch.Stream(device=device)
        self._queueing = RLock()  # one work at a time: what one queues is not mixed with what another does
        self._open = Condition()
        self._unsettled = 0
        self._closed = False
        self._process = os.getpid()

    def issue(self, work: Task, after: Collection[Ticket] = (), *, nbytes: int = 0) -> Ticket:  # noqa: ARG002
        if self._closed:
            return CompletedTicket(StateError(f"the lane {self.name} is closed"))
        ticket, before = StreamTicket(), tuple(after)
        with self._open:
            self._unsettled += 1
        when_all_settled(before, lambda: self._queue(work, before, ticket))
        return ticket

    def _queue(self, work: Task, after: Collection[Ticket], ticket: StreamTicket) -> None:
        how: torch.Event | BaseException = StateError(f"the lane {self.name} was interrupted")
        try:
            with self._queueing, self.stream:
                for earlier in after:
                    earlier.wait_on_device()
                work()
                how = self.stream.record_event()
        except torch.AcceleratorError as error:
            how = DeviceFailureError(error)
        except Exception as error:
            how = error
        finally:
            if isinstance(how, BaseException):
                with suppress(torch.AcceleratorError):
                    self.stream.synchronize()  # of a part of the work nobody would know
            with self._open:
                self._unsettled -= 1
                self._open.notify_all()
            ticket.settle(how)

    def drain(self) -> None:
        if os.getpid() != self._process:  # a forked child has no device
            return
        with self._open:
            self._open.wait_for(lambda: not self._unsettled)
        with suppress(torch.AcceleratorError):  # which tickets have; nothing runs on a device that has failed
            self.stream.synchronize()

    def close(self) -> None:
        self.drain()
        self._closed = True
