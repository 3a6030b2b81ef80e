"""Values of a model as files have them, each tensor whole, wherever its parts are.

Where ranks share the model, all write at once. In each *round* every rank is sent one chunk of a plane, the next that its own files need, and sends
the others its shares of theirs. A byte travels once, to the rank that writes it, and two chunks are beside model data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, groupby, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from patrickstar.core.layout import Layout, Part
from patrickstar.core.planes import PlaneRef
from patrickstar.core.shard_layout import ShardLayout
from patrickstar.parameters.bound import BoundParameter
from patrickstar.session.parts import Parts
from patrickstar.step.values import put_together


class Kept(NamedTuple):
    """A parameter's values in a plane."""

    plane: str
    bound: BoundParameter


@dataclass(slots=True, eq=False)
class _Rounds:
    """Rounds that are left, each the chunks that ranks are sent, if they need one.

    `whole`: the layout of all ranks together. `wanted`: plane and name of all that is read. `there`: what has come, as `received`.
    """

    whole: Layout
    left: Iterator[tuple[PlaneRef | None, ...]]
    wanted: frozenset[tuple[str, str]]
    shares: Tensor
    received: Tensor
    there: PlaneRef | None = None
    problem: Exception | None = None


@dataclass(slots=True, eq=False)
class Delivery:
    """Reads tensors by the names that they have in files. `sources`: where the values of each are: in chunks, or in a buffer."""

    parts: Parts
    sources: Mapping[str, Kept | Tensor]
    _rounds: _Rounds | None = field(default=None, init=False)

    def read(self, name: str) -> Iterator[Tensor]:
        """A tensor's elements in order, in contiguous 1-D pieces on the host, each valid until the next is asked for."""
        source = self.sources[name]
        if isinstance(source, Tensor):
            yield source.detach().cpu().contiguous().reshape(-1)
            return
        plane, bound = source
        pieces = self.parts.weights.pieces(bound.name, plane) if self._rounds is None else self._sent(bound.name, plane)
        if bound.shape_only.is_contiguous():
            yield from pieces
        else:
            yield self._in_order(bound, pieces)

    def _in_order(self, bound: BoundParameter, pieces: Iterable[Tensor]) -> Tensor:
        whole = torch.empty_strided(bound.shape_only.shape, bound.shape_only.stride(), device="cpu")
        with self.parts.executor.apart(), self.parts.executor.room.making(whole.nbytes):
            put_together(bound.flat(whole), pieces)
        return whole.contiguous().reshape(-1)

    @contextmanager
    def rounds(self, names: Sequence[Sequence[str]]) -> Iterator[None]:
        """A context in which this rank reads its tensors of those that each rank reads, in order.

        It ends when all ranks have been sent what they need, whatever goes wrong on this one, and raises that then.
        """
        layout = self.parts.layout
        collectives = self.parts.collectives
        if collectives is None or not isinstance(layout, ShardLayout):
            yield
            return
        kept = {name: source for name, source in self.sources.items() if isinstance(source, Kept)}
        chunks = {
            name: [PlaneRef(part.chunk, plane) for part in layout.whole.parts(bound.name)]
            for name, (plane, bound) in kept.items()
        }
        needed = [
            [ref for ref, _ in groupby(chain.from_iterable(chunks.get(name, ()) for name in own))] for own in names
        ]
        shares = torch.zeros(layout.size, layout.chunk_numel)
        wanted = frozenset((plane, bound.name) for plane, bound in kept.values())
        with self.parts.executor.room.making(2 * shares.nbytes):
            received = torch.empty_like(shares).view(-1)
            self._rounds = rounds = _Rounds(layout.whole, zip_longest(*needed), wanted, shares, received)
            try:
                yield
            except Exception as error:
                rounds.problem = error
            for refs in rounds.left:
                self._send(rounds, refs)
            self._rounds = None
        if rounds.problem is not None:
            raise rounds.problem

    def _sent(self, name: str, plane: str) -> Iterator[Tensor]:
        rounds = self._rounds
        assert rounds is not None
        for chunk, start, stop, _ in rounds.whole.parts(name):
            while rounds.there != PlaneRef(chunk, plane):
                self._send(rounds, next(rounds.left))
            yield rounds.received[start:stop].cpu()

    def _send(self, rounds: _Rounds, refs: Sequence[PlaneRef | None]) -> None:
        """One round. `refs`: the chunk that each rank is sent."""
        collectives = self.parts.collectives
        assert collectives is not None
        for share, ref in zip(rounds.shares, refs, strict=True):
            if ref is not None and rounds.problem is None:
                try:
                    self._fill(share, ref, rounds.wanted)
                except Exception as error:  # the others are to have their round all the same
                    rounds.problem = error
        collectives.exchange(rounds.received, rounds.shares, f"{', '.join(map(str, refs))} for files").wait()
        rounds.there = refs[collectives.ranks.rank]

    def _fill(self, share: Tensor, ref: PlaneRef, wanted: Collection[tuple[str, str]]) -> None:
        """Copies this rank's share of a chunk, as far as what is read lies in it."""
        for name, start, stop, tensor_start in self.parts.layout.tensors_in(ref.chunk):
            if (ref.plane, name) in wanted:
                pieces = self.parts.weights.pieces_of(name, Part(ref.chunk, start, stop, tensor_start), ref.plane)
                put_together(share[start:stop], pieces)
