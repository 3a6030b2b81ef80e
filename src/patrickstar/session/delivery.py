"""Values of a model as files have them, each tensor whole, wherever its parts are.

Where ranks share the model, all write at once. In each *round* every rank is sent one chunk of a plane, the next that its own files need, and sends
the others its shares of theirs. A byte travels once, to the rank that writes it, and two chunks are beside model data.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain, groupby, zip_longest
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from patrickstar.core.layout import Part
from patrickstar.core.planes import PlaneRef
from patrickstar.core.shard_layout import ShardLayout
from patrickstar.parameters.bound import BoundParameter
from patrickstar.session.mesh_tensors import MeshTensors
from patrickstar.session.parts import Parts
from patrickstar.step.values import put_together


class Kept(NamedTuple):
    """A parameter's values in a plane."""

    plane: str
    bound: BoundParameter


@dataclass(slots=True, eq=False)
class Delivery:
    """Reads tensors by the names that they have in files. `sources`: where the values of each are: in chunks, or in a buffer."""

    parts: Parts
    sources: Mapping[str, Kept | Tensor]
    _left: Iterator[tuple[Any, Tensor]] | None = field(default=None, init=False)
    """Rounds that are left, each with what has come: its name, and the values."""

    _there: PlaneRef | None = field(default=None, init=False)
    _received: Tensor = field(init=False)
    _problem: Exception | None = field(default=None, init=False)

    def read(self, name: str) -> Iterator[Tensor]:
        """A tensor's elements in order, in contiguous 1-D pieces on the host, each valid until the next is asked for."""
        source = self.sources[name]
        if isinstance(source, Tensor):
            yield source.detach().cpu().contiguous().reshape(-1)
        else:
            yield from self._pieces(name, source)

    def _pieces(self, name: str, source: Kept) -> Iterator[Tensor]:  # noqa: ARG002  (of a mesh, it is asked for)
        plane, bound = source
        pieces = self.parts.weights.pieces(bound.name, plane) if self._left is None else self._sent(bound.name, plane)
        if bound.shape_only.is_contiguous():
            yield from pieces
        else:
            yield self._in_order(bound, pieces)

    def _in_order(self, bound: BoundParameter, pieces: Iterable[Tensor]) -> Tensor:
        whole = torch.empty_strided(bound.shape_only.shape, bound.shape_only.stride(), device="cpu")
        with self.parts.executor.apart(), self.parts.executor.room.making(whole.nbytes):
            put_together(bound.flat(whole), pieces)
        return whole.contiguous().reshape(-1)

    def _sent(self, name: str, plane: str) -> Iterator[Tensor]:
        layout = self.parts.layout
        assert isinstance(layout, ShardLayout)
        assert self._left is not None
        for chunk, start, stop, _ in layout.whole.parts(name):
            while self._there != PlaneRef(chunk, plane):
                self._there, self._received = next(self._left)
            yield self._received[start:stop].cpu()

    @contextmanager
    def rounds(self, names: Sequence[Sequence[str]]) -> Iterator[None]:
        """A context in which this rank reads its tensors of those that each rank reads, in order.

        It ends when all ranks have been sent what they need, whatever goes wrong on this one, and raises that then.
        """
        if self.parts.everyone is None:
            yield
            return
        self._problem = self._there = None
        with closing(self._all(names)) as self._left:
            try:
                yield
            except Exception as error:
                self._problem = error
            for _ in self._left:  # the others are to have all of theirs
                pass
        self._left = None
        if self._problem is not None:
            raise self._problem

    def _all(self, names: Sequence[Sequence[str]]) -> Generator[tuple[Any, Tensor]]:
        """All rounds: the chunk that this rank is sent in each, and its elements."""
        layout, collectives = self.parts.layout, self.parts.collectives
        assert collectives is not None
        assert isinstance(layout, ShardLayout)
        kept = {name: source for name, source in self.sources.items() if isinstance(source, Kept)}
        chunks = {
            name: [PlaneRef(part.chunk, plane) for part in layout.whole.parts(bound.name)]
            for name, (plane, bound) in kept.items()
        }
        needed = [
            [ref for ref, _ in groupby(chain.from_iterable(chunks.get(name, ()) for name in own))] for own in names
        ]
        wanted = frozenset((plane, bound.name) for plane, bound in kept.values())
        shares = torch.zeros(layout.size, layout.chunk_numel)
        with self.parts.executor.room.making(2 * shares.nbytes):
            received = torch.empty_like(shares).view(-1)
            for refs in zip_longest(*needed):
                for share, ref in zip(shares, refs, strict=True):
                    if ref is not None and self._problem is None:
                        try:
                            self._fill(share, ref, wanted)
                        except Exception as error:  # the others are to have their round all the same
                            self._problem = error
                collectives.exchange(received, shares, f"{', '.join(map(str, refs))} for files").wait()
                yield refs[collectives.ranks.rank], received

    def _fill(self, share: Tensor, ref: PlaneRef, wanted: Collection[tuple[str, str]]) -> None:
        """Copies this rank's share of a chunk, as far as what is read lies in it."""
        for name, start, stop, tensor_start in self.parts.layout.tensors_in(ref.chunk):
            if (ref.plane, name) in wanted:
                pieces = self.parts.weights.pieces_of(name, Part(ref.chunk, start, stop, tensor_start), ref.plane)
                put_together(share[start:stop], pieces)


class MeshDelivery(Delivery):
    """Reads whole tensors of a model in blocks, of which each rank is sent all, in the order in which they are written."""

    def _pieces(self, name: str, source: Kept) -> Iterator[Tensor]:
        assert self._left is not None
        numel = prod(self.parts.shape(source.bound))
        while numel:
            other, strip = next(self._left)
            if other == name:
                numel -= len(strip)
                yield strip

    def _all(self, names: Sequence[Sequence[str]]) -> Generator[tuple[Any, Tensor]]:
        mesh = self.parts.mesh
        assert mesh is not None
        for name in chain.from_iterable(names):
            if isinstance(source := self.sources[name], Kept):
                for strip in mesh.strips(source.bound.name, self._kept(source, mesh)):
                    yield name, strip

    def _kept(self, source: Kept, mesh: MeshTensors) -> Tensor:
        if self._problem is None:
            try:
                return mesh.kept(source.bound.name, source.plane)
            except Exception as error:  # the others are to have theirs all the same
                self._problem = error
        return torch.zeros(source.bound.shape_only.shape, device="cpu")
