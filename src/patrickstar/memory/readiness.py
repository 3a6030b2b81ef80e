"""Readiness of bytes that a device moves: what must be over before they are used or changed, where no thread of the host waits for it.

A transfer counts as arrived once it is queued, and slots are given back while kernels that read them are queued: who comes next has the device wait.
A copy of a weight is made, on the stream of its first use, where a user believes that the weight has always been: other streams come after that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.memory.lanes import Ticket
from patrickstar.memory.stream_lane import StreamTicket

Place = tuple[PlaneRef, Tier]
"""A unit's bytes on one tier."""


class Readiness:
    """The last works on each place that may still be under way on a device. `device`: None where nothing is, and nobody has to ask."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._streams: dict[int, torch.Stream] = {}
        self._written: dict[Place, Ticket] = {}
        self._read: dict[Place, list[Ticket]] = {}
        self._seen: dict[Place, set[int]] = {}

    def written(self, place: Place, ticket: Ticket) -> None:
        """Notes a work that writes there: the last one, which comes after all before it."""
        self._written[place] = ticket
        self._read.pop(place, None)
        self._seen.pop(place, None)

    def read(self, place: Place, ticket: Ticket) -> None:
        """Notes a work that reads there."""
        reading = self._read.setdefault(place, [])
        reading[:] = [earlier for earlier in reading if not earlier.done]
        reading.append(ticket)

    def before_reading(self, place: Place) -> list[Ticket]:
        """Tickets that a work which reads there comes after, but for what has been computed."""
        ticket = self._written.get(place)
        return [] if ticket is None else [ticket]

    def before_writing(self, place: Place) -> list[Ticket]:
        """Tickets that a work which writes there comes after, but for what has been computed."""
        return [*self.before_reading(place), *self._read.get(place, ())]

    def computed(self) -> list[Ticket]:
        """Tickets of all that has been queued so far by whoever computes with slots of the device."""
        return [StreamTicket(stream) for stream in self._streams.values()]

    def compute(self, places: Iterable[Place], *, writes: Iterable[Place] = ()) -> None:
        """Has the current stream of this thread, which is about to use these places of the device, wait for what is under way on them.

        `writes`: those of them that it will write to.
        """
        if self._device is None:
            return
        stream = torch.accelerator.current_stream(self._device)
        number = stream.stream_id
        self._streams.setdefault(number, stream)
        for place in places:
            ticket = self._written.get(place)
            if ticket is not None and number not in self._seen.setdefault(place, set()):
                ticket.wait_on_device()
                self._seen[place].add(number)
        for place in writes:
            for ticket in self._read.pop(place, ()):
                ticket.wait_on_device()

    def wait(self, place: Place) -> None:
        """Waits on the host for what is under way on a place of the host."""
        for ticket in self.before_writing(place):
            ticket.wait()
        self.forget(place)

    def forget(self, place: Place) -> None:
        """Forgets a place whose slots are given back, or which nothing is under way on."""
        self._written.pop(place, None)
        self._read.pop(place, None)
        self._seen.pop(place, None)


class CopyStreams:
    """The last writing of each copy of a weight, or gradient, on a device, and the streams that come after it: each keeps its memory from whoever
    comes next."""

    def __init__(self) -> None:
        self._written: dict[Hashable, StreamTicket] = {}
        self._seen: dict[Hashable, set[int]] = {}

    def written(self, key: Hashable, copy: Tensor) -> None:
        """Notes that a copy has been written on the current stream of this thread."""
        if copy.is_cuda:
            stream = torch.accelerator.current_stream(copy.device)
            copy.record_stream(stream)  # which is perhaps not the one whose memory it is
            self._written[key] = StreamTicket(stream)
            self._seen[key] = {stream.stream_id}

    def made(self, key: Hashable, copy: Tensor) -> None:
        """Notes that the current stream is about to use a copy for the first time, and has written it where nobody has said who has."""
        (self.use if key in self._written else self.written)(key, copy)

    def use(self, key: Hashable, copy: Tensor) -> None:
        """Has the current stream of this thread, which is about to use a copy, come after its writing."""
        ticket = self._written.get(key)
        if ticket is None:
            return
        stream = torch.accelerator.current_stream(copy.device)
        if stream.stream_id not in self._seen[key]:
            ticket.wait_on_device()
            copy.record_stream(stream)
            self._seen[key].add(stream.stream_id)

    def forget(self, key: Hashable) -> None:
        """Forgets a copy that is let go."""
        self._written.pop(key, None)
        self._seen.pop(key, None)
