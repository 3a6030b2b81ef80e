"""Data on their way between ranks: over gloo on the host, over NCCL from GPU to GPU, and by way of the host where NCCL serves no such device.

On a device all of it is done on a stream of our own, after what the stream of whoever asked had been given by then. It is over when the thread that
does it goes on: whoever waits for that may use what has come on any stream, and give memory back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor

from patrickstar.comm.ranks import Ranks
from patrickstar.memory.device_failure import noticed_at
from patrickstar.memory.lanes import Task
from patrickstar.torch_private import all_gather, all_to_all, broadcast
from patrickstar.units import MIB

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend

_STAGING_BYTES: Final = 8 * MIB


def staging_bytes(device: torch.device | str | None) -> int:
    """Bytes of the host through which each rank's data go to others: 0 where they need not, on the host itself and between GPUs that NCCL serves."""
    return _STAGING_BYTES if str(device).startswith("cuda") and not dist.is_nccl_available() else 0


class Transport:
    """The ways of data. `finish`: returns when works of torch have ended."""

    def __init__(self, ranks: Ranks, finish: Callable[..., None]) -> None:
        self._ranks = ranks
        self._finish = finish
        self._staging: Tensor | None = None
        self._streams: dict[torch.device, torch.Stream] = {}

    def after_now(self, device: torch.device, act: Task) -> Task:
        """The act as it is done for tensors of a device, which are ready on the current stream of this thread."""
        if device.type == "cpu":
            return act
        ready = torch.accelerator.current_stream(device).record_event()

        def on_device() -> None:
            stream = self._streams[device] = self._streams.get(device) or torch.Stream(device)
            with stream, noticed_at("an exchange with other ranks"):
                stream.wait_event(ready)
                act()
                stream.synchronize()  # it has this collective alone

        return on_device

    def gather(self, out: Tensor, shard: Tensor) -> None:
        """Has `out` get the shards of all ranks, in their order. `shard`: perhaps its place in `out`."""
        self._move(partial(_begin_to_gather, self._ranks.rank), out, shard)

    def exchange(self, out: Tensor, parts: Tensor, also: Sequence[dist.Work] = ()) -> None:
        """Has `out` get each rank's part of `parts` that is for this one, in their order. `also`: works that are to end, too."""
        self._move(lambda *given: [all_to_all(*given)], out, parts, also)

    def redistribute(self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Has each rank get its part of `given`, and `out` what is for this one: so many elements of each. On the host, or by way of it."""
        here, width = out if out.is_cpu else torch.empty_like(out, device="cpu"), out.element_size()
        splits = [[width * numel for numel in numels] for numels in (received, sent)]
        self._finish(all_to_all(self._ranks.group, as_bytes(here), as_bytes(given.cpu()), *splits))
        if here is not out:
            out.copy_(here)

    def _move(
        self,
        begin: Callable[[Backend, Tensor, Tensor], list[dist.Work]],
        out: Tensor,
        sent: Tensor,
        also: Sequence[dist.Work] = (),
    ) -> None:
        """Has works fill `out`, a row from each rank, with what is `sent` in as long rows: where these are, or by way of the host."""
        ranks, out = self._ranks, as_bytes(out).view(self._ranks.size, -1)
        sent, buffer_bytes = as_bytes(sent).view(-1, out.shape[1]), staging_bytes(out.device)
        if not buffer_bytes:
            self._finish(*begin(ranks.group if out.is_cpu else ranks.group_of_gpus(), out, sent), *also)
            return
        if self._staging is None:
            self._staging = torch.empty(2, buffer_bytes // 2, dtype=torch.uint8, device="cpu", pin_memory=True)
        width = self._staging.shape[1] // ranks.size
        for start in range(0, out.shape[1], width):
            columns = slice(start, min(start + width, out.shape[1]))
            theirs, mine = (
                half[: rows[:, columns].numel()].view(len(rows), -1)
                for half, rows in zip(self._staging, (out, sent), strict=True)
            )
            for row, of_device in zip(mine, sent, strict=True):
                row.copy_(of_device[columns])
            self._finish(*begin(ranks.group, theirs, mine), *also)
            also = ()
            for row, of_device in zip(theirs, out, strict=True):
                of_device[columns].copy_(row)


def _begin_to_gather(rank: int, group: Backend, out: Tensor, shard: Tensor) -> list[dist.Work]:
    if not out.is_cpu:
        return [all_gather(group, out, shard)]
    # As many bytes as by gloo's gather, which copies all of it once more, and half of the time or less.
    if out[rank].data_ptr() != shard.data_ptr():
        out[rank].copy_(shard[0])
    return [broadcast(group, piece, root) for root, piece in enumerate(out)]


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements as bytes, which every backend takes."""
    return tensor.view(-1).view(torch.uint8)
