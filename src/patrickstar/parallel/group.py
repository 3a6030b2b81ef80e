"""Ranks along a dimension of a mesh: what they send each other, and what they agree on before. Under fake tensors nothing is sent.

All wait in one way, for a second at a time. In between, sessions look at the ranks: so nobody waits for one that has failed, nor for longer than
`Options(collective_timeout=)`; without a session not longer than ten minutes.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from patrickstar.errors import RankError, some
from patrickstar.torch_private import FakeTensor, all_gather, all_to_all, is_imagined, reduce_scatter

_LONGEST: Final = timedelta(seconds=600)
_LOOK: Final = timedelta(seconds=1)
Look = Callable[[float, RuntimeError | None], None]
"""Raises a RankError where waiting is in vain, so many seconds until now: one of the ranks has failed, or torch has an error."""
Wait = Callable[[], None]
"""Returns when what has begun has ended. Raises a RankError, which names ranks and the layer, where it will not."""


class Shift(NamedTuple):
    """A hop under way. `tensors` and `into` belong to it until it has ended."""

    tensors: list[Tensor]
    into: list[Tensor]
    waits: list[Wait]

    def wait(self) -> list[Tensor]:
        """The tensors that have come from the previous rank."""
        for wait in self.waits:
            wait()
        return self.into


@dataclass(frozen=True, slots=True, eq=False)
class MeshGroup:
    """The ranks along one dimension of a mesh, in order; this rank by itself, where nothing is given. A copy of what holds it shares it.

    Attributes:
        name: of the dimension. members: numbers in the whole program. rank: the place of this one among them. group: torch's, of all of them.
        layer: what they compute, for messages. looks: of sessions.
    """

    name: str = ""
    members: tuple[int, ...] = (0,)
    rank: int = 0
    group: Any = None
    layer: str = ""
    looks: list[Look] = field(default_factory=list)
    _n_times_bytes: Counter[bool] = field(default_factory=Counter)
    """That were sent; those of fake tensors apart."""

    @classmethod
    def along(cls, mesh: DeviceMesh, dim: int = 0, *, name: str = "cp", is_apart: bool = False) -> MeshGroup:
        """The ranks of this one's line in a mesh.

        Args:
            name: of the dimension, where the mesh has none. is_apart: in a process group of their own, so that a hop and a gather never wait for
                each other: all ranks make theirs in the same order.
        """
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "this rank is not of the mesh"
        name = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else name
        line = mesh.mesh[tuple(slice(None) if at == dim else place for at, place in enumerate(coordinate))]
        members, group = tuple(line.tolist()), None
        if len(members) > 1 and is_apart:
            group = dist.new_group(
                list(members), timeout=_LONGEST, use_local_synchronization=True, group_desc=f"mesh_{name}"
            )
        elif len(members) > 1:
            group = mesh.get_group(dim)
        return cls(name, members, coordinate[dim], group)

    def __deepcopy__(self, _: Any) -> MeshGroup:
        return self  # ranks are not copied

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    def sent_bytes(self, *, imagined: bool = False) -> int:
        """Bytes that this rank has handed to the group so far, as `traffic` counts, rounded up. `imagined`: of fake tensors, sent by nobody."""
        return math.ceil(self._n_times_bytes[imagined] / self.size)

    def shift(self, tensors: Sequence[Tensor], into: Sequence[Tensor]) -> Shift:
        """Begins to send contiguous tensors to the next rank, and to receive, into others like them, those of the previous one.

        By an exchange in which each has something for one rank: torch's sends over gloo cannot be asked whether they have ended, and whoever waits
        for one no longer than so ends the connection.
        """
        after, before = ((self.rank + way) % self.size for way in (1, -1))
        waits = []
        for mine, theirs in zip(tensors, into, strict=True):
            to, of = ([mine.numel() * (place == other) for place in range(self.size)] for other in (after, before))
            hop = partial(dist.all_to_all_single, theirs.view(-1), mine.view(-1), of, to, self.group, async_op=True)
            waits.append(self._begin(mine, self.size, hop))
        return Shift(list(tensors), list(into), waits)

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, [N, ...] in their order."""
        out = tensor.new_empty((self.size, *tensor.shape))
        flat = tensor.contiguous().view(-1)
        self._begin(tensor, self.size * (self.size - 1), lambda: all_gather(self.group, out.view(-1), flat))()
        return out

    def scatter_sum(self, pieces: Tensor) -> Tensor:
        """The sum over ranks of this rank's piece of each [N, ...]."""
        out = torch.empty_like(pieces[0])
        self._begin(pieces, self.size - 1, lambda: reduce_scatter(self.group, out.view(-1), pieces.view(-1)))()
        return out

    def exchange(self, pieces: Tensor) -> Tensor:
        """Pieces for this rank, [N, ...] in the order of the ranks that send them, of what each rank has for all."""
        out = torch.empty_like(pieces)
        self._begin(pieces, self.size - 1, lambda: all_to_all(self.group, out.view(-1), pieces.view(-1)))()
        return out

    def broadcast(self, tensor: Tensor, place: int) -> Wait:
        """Begins to give all what the rank at a place has."""
        return self._begin_with(tensor, partial(dist.broadcast, tensor, src=self.members[place]))

    def reduce(self, tensor: Tensor, place: int) -> Wait:
        """Begins to sum a tensor over all, for the rank at a place. Others' tensors have no meaning afterwards."""
        return self._begin_with(tensor, partial(dist.reduce, tensor, dst=self.members[place]))

    def _begin_with(self, block: Tensor, send: Callable[..., Any]) -> Wait:
        if not block.numel() or self.size == 1:  # an empty block is so on all ranks
            return lambda: None
        return self._begin(block, self.size - 1, partial(send, group=self.group, async_op=True))

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The sums of some tensors of one dtype over all ranks, by one call."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._all_reduce(flat, dist.ReduceOp.SUM)
        pieces = flat.split([tensor.numel() for tensor in tensors])
        return tuple(piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True))

    def largest(self, tensor: Tensor) -> Tensor:
        """The elements' maxima over all ranks, in place."""
        self._all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def agree(self, what: str, text: str, *, advice: str = "Give all of them the same") -> None:
        """Compares a text with those of other ranks, by the store, not the process group. RankError: two ranks and what each has; on all alike."""
        world = dist.group.WORLD
        if self.size == 1 or world is None or is_imagined(world):
            return
        # One number more for each time, on all that do the same. Those that are not alike find out by the text.
        who = f"{self.name}/{self.members}" if self.group is None else self.group.group_name
        store = dist.PrefixStore(f"patrickstar/{who}", world.get_group_store())
        time = store.add(f"times/{self.rank}", 1)
        keys = [f"{time}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], text)
        try:
            store.wait(keys, _LONGEST)
        except RuntimeError as error:
            late = [self.members[rank] for rank, key in enumerate(keys) if not store.check([key])]
            reason = f"rank {late} did not come to {what} within {_LONGEST.total_seconds():.0f} s"
            raise RankError(f"{reason}: all of {self} do the same", ranks=late, reason=reason) from error
        texts = [store.get(key).decode() for key in keys]
        if time > 1:  # all ranks are here, and have read what was there before
            store.delete_key(f"{time - 1}/{self.rank}")
        odd = next((rank for rank, theirs in enumerate(texts) if theirs != texts[0]), None)
        if odd is not None:
            ranks = (self.members[0], self.members[odd])
            reason = f"{what}: rank {ranks[0]} has {texts[0]}, and rank {ranks[1]} has {texts[odd]}"
            raise RankError(f"{reason}. {advice}: {self}", ranks=ranks, action=what, reason=reason)

    def __str__(self) -> str:
        return f'ranks {some(list(map(str, self.members)), most=8)} of "{self.name}"'

    def _all_reduce(self, tensor: Tensor, op: Any) -> None:
        if self.size > 1:
            start = partial(dist.all_reduce, tensor, op=op, group=self.group, async_op=True)
            self._begin(tensor, 2 * (self.size - 1), start)()

    def _begin(self, tensor: Tensor, nths: int, start: Callable[[], Any]) -> Wait:
        """Begins what hands so many n-ths of a tensor's bytes to the group."""
        self._n_times_bytes[isinstance(tensor, FakeTensor)] += nths * tensor.nbytes
        with self._named():
            return partial(self._wait, start(), is_of_gpu=tensor.is_cuda)

    def _wait(self, work: Any, *, is_of_gpu: bool) -> None:
        with self._named():
            if is_of_gpu:  # its stream waits, not this thread
                work.wait()
                return
            for waited in itertools.count(1):
                if self._has_ended(work, waited):
                    return

    def _has_ended(self, work: Any, waited: int) -> bool:
        """Waits for a second more, and looks at the ranks where that is not enough."""
        is_over = work.is_completed()  # else an error may be that of our own bound
        try:
            work.wait(_LOOK)
        except RuntimeError as error:
            for look in self.looks:
                look(waited * _LOOK.total_seconds(), error if is_over else None)
            if not self.looks and (is_over or waited * _LOOK >= _LONGEST):
                raise
            return False
        return True

    @contextmanager
    def _named(self) -> Iterator[None]:
        """A context whose errors are those of ranks, and name the layer."""
        here = f" in {self.layer}" if self.layer else ""
        try:
            yield
        except RankError as error:
            if not here:
                raise
            text = f"{error} (this rank waited for others{here})"
            raise RankError(text, ranks=error.ranks, action=error.action, reason=error.reason) from error
        except RuntimeError as error:
            reason = f"an exchange with {self} failed{here}: {str(error).partition(chr(10))[0]}"
            raise RankError(f"{reason}. Start again from the newest checkpoint", reason=reason) from error


def digest(tensor: Tensor) -> str:
    """A text for the shape, type and values of a tensor; for floating ones of shape and type."""
    kind = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.is_floating_point():
        return kind
    values = tensor.detach().cpu().contiguous().view(-1).numpy().tobytes()
    return f"{kind} of digest {hashlib.sha256(values).hexdigest()[:8]}"
