"""Ranks that work on one thing together: a process group of their own, what they exchange there, and what they agree on before.

The group is apart from those of weights and gradients, so that a hop and a gather never wait for each other. Under fake tensors nothing is sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from patrickstar.errors import RankError
from patrickstar.torch_private import FakeTensor, all_gather, all_to_all, is_imagined, reduce_scatter

_TIMEOUT: Final = timedelta(seconds=600)


class SentBytes:
    """Bytes that this rank hands to a process group of `size` ranks, counted as `traffic` does; those of fake tensors apart."""

    def __init__(self, size: int) -> None:
        self._size, self._n_times_bytes = size, {False: 0, True: 0}

    @property
    def total(self) -> int:
        """Bytes that have been sent so far, rounded up."""
        return math.ceil(self._n_times_bytes[False] / self._size)

    @property
    def imagined(self) -> int:
        """Bytes of fake tensors, which nobody has sent, rounded up."""
        return math.ceil(self._n_times_bytes[True] / self._size)

    def add(self, tensor: torch.Tensor, nths: int) -> None:
        """Notes so many n-ths of a tensor's bytes, for n ranks."""
        self._n_times_bytes[isinstance(tensor, FakeTensor)] += nths * tensor.nbytes


class MeshGroup:
    """The ranks along one dimension of a mesh, in order. A copy of what holds it shares it.

    Args:
        mesh: of one dimension. All its ranks make their groups in the same order. None: this rank by itself.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.name, self.size, self.rank = "", 1, 0
        if mesh is not None:
            self.name = (mesh.mesh_dim_names or ("cp",))[0]
            self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.sent = SentBytes(self.size)
        self._agreed = 0
        if mesh is not None and self.size > 1:
            self._members = dist.get_process_group_ranks(mesh.get_group())
            self._group: Any = dist.new_group(
                self._members, timeout=_TIMEOUT, use_local_synchronization=True, group_desc=f"mesh_{self.name}"
            )
            assert self._group is not None
            world = dist.group.WORLD
            assert world is not None
            self._store = dist.PrefixStore(f"patrickstar/{self._group.group_name}", world.get_group_store())

    def __deepcopy__(self, _: Any) -> MeshGroup:
        """The group itself: ranks are not copied."""
        return self

    def shift(self, tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor], *, tag: int = 0) -> Shift:
        """Begins to send contiguous tensors to the next rank, and to receive, into others like them, those of the previous one."""
        after, before = (self._members[(self.rank + way) % self.size] for way in (1, -1))
        ops = []
        for number, (mine, theirs) in enumerate(zip(tensors, into, strict=True)):
            self.sent.add(mine, self.size)
            ops.append(dist.P2POp(dist.isend, mine, after, self._group, tag + number))
            ops.append(dist.P2POp(dist.irecv, theirs, before, self._group, tag + number))
        between = f"ranks {before} and {after}"
        with _named(between):
            return Shift(dist.batch_isend_irecv(ops), list(tensors), list(into), between)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, [N, ...] in their order."""
        out = tensor.new_empty((self.size, *tensor.shape))
        self.sent.add(tensor, self.size * (self.size - 1))
        with _named(str(self)):
            all_gather(self._group, out.view(-1), tensor.contiguous().view(-1)).wait()
        return out

    def scatter_sum(self, pieces: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of this rank's piece of each [N, ...]."""
        out = torch.empty_like(pieces[0])
        self.sent.add(pieces, self.size - 1)
        with _named(str(self)):
            reduce_scatter(self._group, out.view(-1), pieces.view(-1)).wait()
        return out

    def exchange(self, pieces: torch.Tensor) -> torch.Tensor:
        """Pieces for this rank, [N, ...] in the order of the ranks that send them, of what each rank has for all."""
        out = torch.empty_like(pieces)
        self.sent.add(pieces, self.size - 1)
        with _named(str(self)):
            all_to_all(self._group, out.view(-1), pieces.view(-1)).wait()
        return out

    def add_up(self, tensor: torch.Tensor) -> None:
        """Has a tensor be the sum of all ranks' ones."""
        if self.size > 1:
            self.sent.add(tensor, 2 * (self.size - 1))
            with _named(str(self)):
                dist.all_reduce(tensor, group=self._group)

    def agree(self, what: str, text: str) -> None:
        """Compares a text with those of the other ranks, through the store: nothing goes over the process group.

        Raises:
            RankError: two ranks, and what each has; on all ranks alike.
        """
        if self.size == 1 or is_imagined(self._group):
            return
        self._agreed += 1
        keys = [f"{self._agreed}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], text)
        try:
            self._store.wait(keys, _TIMEOUT)
        except RuntimeError as error:
            late = [self._members[rank] for rank, key in enumerate(keys) if not self._store.check([key])]
            reason = f"rank {late} did not come to {what} within {_TIMEOUT.total_seconds():.0f} s"
            raise RankError(f"{reason}: all ranks of {self} do the same", ranks=late, reason=reason) from error
        texts = [self._store.get(key).decode() for key in keys]
        if self._agreed > 1:  # all ranks are here, and have read what was there before
            self._store.delete_key(f"{self._agreed - 1}/{self.rank}")
        odd = next((rank for rank, theirs in enumerate(texts) if theirs != texts[0]), None)
        if odd is not None:
            ranks = (self._members[0], self._members[odd])
            reason = f"{what}: rank {ranks[0]} has {texts[0]}, and rank {ranks[1]} has {texts[odd]}"
            raise RankError(f"{reason}. Give all ranks of {self} the same", ranks=ranks, action=what, reason=reason)

    def __str__(self) -> str:
        return f'"{self.name}" ({self.size} ranks)'


@dataclass(frozen=True, slots=True)
class Shift:
    """A hop under way. `tensors` and `into` belong to it until it has ended."""

    works: list[Any]
    tensors: list[torch.Tensor]
    into: list[torch.Tensor]
    between: str

    def wait(self) -> list[torch.Tensor]:
        """The tensors that have come from the previous rank.

        Raises:
            RankError: a neighbour is gone, or does not answer.
        """
        with _named(self.between):
            for work in self.works:
                work.wait()
        return self.into


@contextmanager
def _named(between: str) -> Iterator[None]:
    """A context whose errors are those of ranks, which have names."""
    try:
        yield
    except RuntimeError as error:
        reason = f"an exchange with {between} failed: {str(error).partition(chr(10))[0]}"
        raise RankError(f"{reason}. Start again from the newest checkpoint", reason=reason) from error


def digest(tensor: torch.Tensor) -> str:
    """A text for the shape, type and values of a tensor; for floating ones of shape and type."""
    kind = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.is_floating_point():
        return kind
    values = tensor.detach().cpu().contiguous().view(-1).numpy().tobytes()
    return f"{kind} of digest {hashlib.sha256(values).hexdigest()[:8]}"
