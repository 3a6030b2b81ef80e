"""Streams that use copies of weights: each comes after what has written a copy last, and keeps its memory from whoever comes next.

The copy is made, on the stream of its first use, where a user believes that a weight has always been: nobody else has reason to wait for that.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from patrickstar.memory.stream_lane import StreamTicket


class CopyStreams:
    """The last writing of each copy on a device, and the streams that come after it."""

    def __init__(self) -> None:
        self._written: dict[Hashable, StreamTicket] = {}
        self._seen: dict[Hashable, set[int]] = {}

    def written(self, key: Hashable, copy: Tensor) -> None:
        """Notes that a copy has been written on the current stream of this thread."""
        if copy.is_cuda:
            stream = torch.accelerator.current_stream(copy.device)
            self._written[key] = StreamTicket(stream)
            self._seen[key] = {stream.stream_id}

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
