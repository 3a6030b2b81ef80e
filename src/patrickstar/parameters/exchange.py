"""The exchange of ranks in a step: whole weights for whoever uses them, and each rank's share of everybody's gradients.

A group of chunks, those of a block or of what no block owns, is gathered into a copy that lives as long as anything holds it (Note [Copies] in
`memory/leases.py`). Weights travel in the type that they are kept in, and each rank widens them where another one computes. What is exchanged,
and when, `call_order.py` says.

Gradients of all ranks are added in rank order in fp32, ((g0 + g1) + g2) + ..., and multiplied by f(1/p): bits that depend on no topology.
Those of a backward travel in the type in which one rank would keep them, sums of several in fp32.
Source: sharding of model states is ZeRO's (Rajbhandari et al., 2020); by chunks it is PatrickStar's (Fang et al., 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from patrickstar.comm.collectives import Collectives
from patrickstar.core.planes import WEIGHT, PlaneRef
from patrickstar.core.shard_layout import ShardLayout
from patrickstar.core.trace import Phase, Touch
from patrickstar.memory.lanes import DONE, Ticket
from patrickstar.memory.leases import CopyStreams
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.call_order import BlockWeights, CallOrder, Coming
from patrickstar.torch_private import backward_id


class BackwardSums(dict[str, Tensor]):
    """Sums so far, by parameter or tile: of the backward that is under way, or of those that wait for other ranks. Parts may come on any stream."""

    def __init__(self) -> None:
        super().__init__()
        self._streams = CopyStreams()

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds a part of a gradient to its sum; the first part becomes the sum."""
        if name in self:
            self._streams.use(name, self[name])
            self[name].add_(gradient)
        else:
            self[name] = gradient
        self._streams.written(name, self[name])

    def take(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """All sums, or those of some parameters, which are not kept after that."""
        taken = {name: self.pop(name) for name in list(self if names is None else names) if name in self}
        for name, gradient in taken.items():
            self._streams.use(name, gradient)
        return taken

    def drop(self, names: Iterable[str]) -> None:
        """Drops the sums of these parameters and tiles."""
        for name in names:
            self.pop(name, None)


class Nobody:
    """Other ranks of a trial run, `size` in all, that do nothing, at once. `sent_bytes`: what would have been sent to them."""

    def __init__(self, size: int) -> None:
        self._others = size - 1
        self.sent_bytes = 0

    def gather(self, out: Tensor, shard: Tensor, what: str) -> Ticket:  # noqa: ARG002
        self.sent_bytes += self._others * shard.nbytes
        return DONE

    def reduce(self, out: Tensor, partial: Tensor, *_: object, flags: bytearray | None = None) -> Ticket:  # noqa: ARG002
        self.sent_bytes += self._others * out.numel() * partial.element_size()
        return DONE

    def exchange(self, out: Tensor, parts: Tensor, what: str, *, flags: bytearray | None = None) -> Ticket:  # noqa: ARG002
        self.sent_bytes += self._others * (parts.nbytes // (self._others + 1))
        return DONE

    def agree(self, value: bytes, what: str) -> list[bytes]:  # noqa: ARG002
        return [value]


class Travel(NamedTuple):
    """The type that weights are kept in, in which they go to other ranks, and that in which the gradients of a backward do.

    `in_parts`: whether each backward is of one part of a step, whose gradients are added to those of the parts before, one after the other.
    """

    kept: torch.dtype = torch.float32
    sent: torch.dtype = torch.float32
    in_parts: bool = False


class Sent(NamedTuple):
    """A chunk of gradients on its way, of which this rank's share is there when `ticket` is done: a row, the mean, or one of each rank.

    `tensors`: what is sent and received into, which stay for so long whenever they have been: a trace has them.
    """

    chunk: int
    rows: Tensor
    ticket: Ticket
    tensors: tuple[Tensor, Tensor]


class Exchange:
    """Makes whole weights of shards, and shards of gradients. With `Nobody`: of a trial run.

    Attributes:
        order: is told of calls, and says what is exchanged. others: with whom. binding: of the parameters, given once it is made.
        take: adds this rank's shares of gradients to those in chunks: which rows of them, by parameter, and by chunk the rows.
        came: gradients of the backward under way that no reduction has taken, by name.
        postpones: how many contexts say that gradients are not to be reduced. kept: those that wait for that, in fp32, by name.
        says: goes to the others with the end of each backward. heard: what any of them has said, alike on all.
        has_waited: whether there has been such a context since gradients were last reduced.
    """

    binding: Binding
    take: Callable[[Mapping[str, Sequence[int]], Iterable[tuple[int, Tensor]]], None]

    def __init__(
        self,
        layout: ShardLayout,
        names: Iterable[str],
        others: Collectives | Nobody,
        travel: Travel,
        moment: Callable[[Phase, str, list[Touch]], None],
    ) -> None:
        self.layout = layout
        self._travel = travel
        self._moment = moment
        self.order = CallOrder(layout, names, gather=self.gather, send=self.send, receive=self.receive)
        self.came = BackwardSums()
        self.postpones, self.has_waited = 0, False
        self.kept = BackwardSums()
        self.says, self.heard = b"", set[bytes]()
        self.others = others
        self._sent: list[Sent] = []
        self._sent_names: list[str] = []
        self._flags = bytearray()  # of these
        self._names_in: dict[str, list[str]] = {}
        for name in layout.slices:
            self._names_in.setdefault(layout.block(name), []).append(name)

    def ours(self, nbytes: int = 0) -> AbstractContextManager[None]:  # noqa: ARG002
        """A context for our own operations, and for so many bytes that they take for good."""
        return torch.no_grad()

    def gather(self, block: str) -> BlockWeights:
        """Begins to gather a block's groups: into what somebody still holds of them, if anybody does."""
        phase = Phase.FORWARD if backward_id() == -1 else Phase.BACKWARD
        units = [PlaneRef(chunk, WEIGHT) for chunk in self.layout.chunks_of[block]]
        self._moment(phase, self._names_in[block][0], [Touch(unit) for unit in units])
        weights = BlockWeights({}, [], self.ours, self.binding.leases.copy_written)
        with self.ours():
            taken = [self.binding.leases.take(unit) for unit in units]
            for group in dict.fromkeys(map(self.layout.group_of, self.layout.chunks_of[block])):
                first = self.binding.access.parameters_in(group)[0]
                held = self.binding.leases.living_copy(group)
                whole = self._empty(first.name, self.layout.group_numel(group)) if held is None else held
                coming, weights.by_group[group] = self.begin_to_gather(group, whole), whole
                if held is None or coming.arrives is None:
                    weights.coming.append(coming)
                else:
                    coming.wait()  # nobody is to see what is not widened yet
            del taken  # none of which may leave while there is room made for copies
        return weights

    def make(self, group: str) -> Tensor:
        """The weights of a group that has been gathered for a use."""
        return self.order.there[self.layout.block_of(self.layout.chunks_in[group][0])].by_group[group]

    def begin_to_gather(self, group: str, whole: Tensor) -> Coming:
        """Begins to gather a group whose shards are resident."""
        kept = torch.float32 if self.layout.is_whole(self.layout.chunks_in[group][0]) else self._travel.kept
        arrives, tickets = whole if whole.dtype is kept else whole.view(kept)[whole.numel() :], []
        for unit, piece in self.pieces(group, arrives):
            mine = self.mine(piece)
            mine.copy_(self.binding.leases.take(unit))
            tickets.append(self.others.gather(piece, mine, f"{unit}{self.order.where}"))
        return Coming(whole, None if arrives is whole else arrives, tickets)

    def mine(self, chunk: Tensor) -> Tensor:
        """The share of a whole chunk that is this rank's."""
        return chunk.view(self.layout.size, -1)[self.layout.rank]

    def pieces(self, group: str, whole: Tensor) -> Iterator[tuple[PlaneRef, Tensor]]:
        """The units of a group's weights, each with its chunk of the whole."""
        numel = self.layout.whole.chunk_numel
        for number, chunk in enumerate(self.layout.chunks_in[group]):
            yield PlaneRef(chunk, WEIGHT), whole[number * numel : (number + 1) * numel]

    @contextmanager
    def postponing(self) -> Iterator[None]:
        """A context in which gradients stay this rank's own, in fp32, until a backward outside of it, or the step."""
        self.postpones, self.has_waited = self.postpones + 1, True
        try:
            yield
        finally:
            self.postpones -= 1

    def kept_bytes(self) -> int:
        """Bytes of gradients that wait to be reduced."""
        return sum(gradient.nbytes for gradient in self.kept.values())

    def send(self, block: str) -> None:
        """Begins to reduce the gradients of a block that have come, each chunk with zeros where this rank has none."""
        if self.postpones:
            return
        names = [name for name in self._names_in[block] if self.binding.by_name[name].parameter.requires_grad]
        with self.ours():
            gradients = self._ready(names)
            self._flags = self._said(bytes(name in gradients for name in names))
            self._sent = list(self._reduce(self.layout.chunks_of[block], names, gradients, flags=self._flags))
        self._sent_names = names

    def receive(self) -> None:
        """Takes this rank's shares of the gradients that were sent last, if any were."""
        sent, self._sent = self._sent, []
        if sent:
            sent[0].ticket.wait()
            size = len(self._sent_names)
            of_all = [self._flags[start : start + size] for start in range(0, len(self._flags), size)]
            self.take(self._rows(self._sent_names, of_all), _shares(sent))

    def end_backward(self) -> None:
        """Ends a backward, or a step: all gradients that have come are reduced, or kept where they are to wait."""
        self.order.end_backward()
        known = list(self.layout.slices)
        with self.ours():
            gradients = self._ready(known)
            if self.postpones:
                for name, gradient in gradients.items():
                    self.kept.add(name, gradient)
                return
            said = bytes(name in gradients for name in known) + self.says
            of_all = self.others.agree(said, "gradients")
            self.heard |= {bytes(theirs[len(known) :]) for theirs in of_all}
            rows = self._rows(known, [theirs[: len(known)] for theirs in of_all])
            self.take(rows, _shares(self._reduce(range(self.layout.n_chunks), rows, gradients)))
            self.has_waited = False

    def serve(self) -> None:
        """Takes part in what others exchange in a forward and its backward that this rank has not: as it has heard its own, without gradients."""
        heard, self.order.heard = self.order.heard, None
        for call in heard or ():
            call()
        self.end_backward()
        self.order.heard = heard

    def _said(self, there: bytes) -> bytearray:
        """The flags of this rank, in the place that is its own where ranks are told apart; those of the others come there."""
        if not self._travel.in_parts:
            return bytearray(there)
        before, after = self.layout.rank, self.layout.size - self.layout.rank - 1
        return bytearray(bytes(before * len(there)) + there + bytes(after * len(there)))

    def _rows(self, names: Sequence[str], of_all: Iterable[Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """The rows that are to be added, by parameter, of those that have any: the mean, or those of the ranks that have a gradient."""
        there = {
            name: tuple(rank for rank, has in enumerate(flags) if has)
            for name, *flags in zip(names, *of_all, strict=True)
        }
        return {name: ranks if self._travel.in_parts else (0,) for name, ranks in there.items() if ranks}

    def _ready(self, names: Collection[str]) -> dict[str, Tensor]:
        """The gradients of these parameters that have come, added to those that have waited."""
        gradients = self.came.take(names)
        if not self.postpones and not self.kept:
            return gradients
        waited = self.kept.take(names)
        with self.ours(sum(4 * gradient.numel() for name, gradient in gradients.items() if name not in waited)):
            for name, gradient in gradients.items():
                if name in waited:
                    waited[name].add_(gradient)
                else:
                    waited[name] = gradient.to(torch.float32, copy=True)
        return waited

    def _reduce(
        self, chunks: Iterable[int], names: Collection[str], came: dict[str, Tensor], *, flags: bytearray | None = None
    ) -> Iterator[Sent]:
        """Sends those of the chunks that have these parameters. Gradients that have come and are sent are let go of. `flags`: go with the first."""
        wanted, numel = set(names), self.layout.whole.chunk_numel
        received: Tensor | None = None
        for chunk in chunks:
            pieces = [piece for piece in self.layout.whole.tensors_in(chunk) if piece.name in wanted]
            if not pieces:
                continue
            is_wide = self.has_waited or self.layout.is_whole(chunk)
            mine = self._empty(pieces[0].name, numel, torch.float32 if is_wide else self._travel.sent).zero_()
            for name, start, stop, at in pieces:
                if name in came:
                    flat = self.binding.by_name[name].flat(came[name])
                    mine[start:stop].copy_(flat[at : at + stop - start])
                    if at + stop - start == flat.numel():
                        del came[name]
                    del flat
            if self._travel.in_parts:
                received = torch.empty_like(mine)
                ticket, rows = self.others.exchange(received, mine, f"c{chunk}", flags=flags), received
            else:
                if received is None or received.dtype is not mine.dtype:  # one after the other
                    received = torch.empty_like(mine)
                rows = torch.empty(self.layout.chunk_numel, dtype=torch.float32, device=mine.device)
                ticket = self.others.reduce(rows, mine, received, f"c{chunk}", flags=flags)
            yield Sent(chunk, rows.view(-1, self.layout.chunk_numel), ticket, (mine, received))
            flags = None
            del mine

    def _empty(self, label: str, numel: int, dtype: torch.dtype | None = None) -> Tensor:
        record = self.binding.by_name[label]
        return torch.empty(numel, dtype=dtype or record.shape_only.dtype, device=record.standin.device)


def _shares(under_way: Iterable[Sent]) -> Iterator[tuple[int, Tensor]]:
    """The shares of chunks, of which the next one is sent before one is waited for."""
    last: Sent | None = None
    for one in chain(under_way, [None]):
        if last is not None:
            last.ticket.wait()
            if last.rows.is_cuda:  # its memory is of the stream that has sent it
                last.rows.record_stream(torch.accelerator.current_stream(last.rows.device))
            yield last.chunk, last.rows
        last = one
