"""Shards: the part that each of several ranks keeps of every chunk, an even share of all of its planes.

A chunk is cut in as many pieces of one size as there are ranks, in rank order. A tensor goes across the cuts: a rank has the parts of it that lie in
its own pieces. A shard is a layout like any other, of smaller chunks, in which a tensor has only some of its elements. What needs a tensor whole
gathers the chunks of its *group*: those of its block, or those of what no block owns, that are of one type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from patrickstar.core.layout import Layout, Part, Run, Slice, Tile
from patrickstar.core.planes import WEIGHT, PlaneRef
from patrickstar.errors import LayoutError

_WHOLE: Final = " in fp32"


@dataclass(frozen=True, slots=True)
class RankOf:
    """One of several ranks: its place, their number, and how many of them share a machine and its budgets."""

    rank: int
    size: int
    local_size: int


@dataclass(frozen=True, slots=True)
class ShardLayout(Layout):
    """The layout of what one rank keeps: chunks of which each is its share of one of the whole layout's.

    Attributes:
        whole: the layout of all ranks together. rank: whose shard this is. size: number of ranks. chunks_of: chunks by block, in order.
        chunks_in: chunks that are gathered together, in order, by group.
    """

    whole: Layout = field(kw_only=True)
    rank: int = field(kw_only=True)
    size: int = field(kw_only=True)
    chunks_of: MappingProxyType[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    chunks_in: MappingProxyType[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Layout.__post_init__(self)
        for name, key_of in {"chunks_of": self.block_of, "chunks_in": self.group_of}.items():
            chunks: dict[str, tuple[int, ...]] = {}
            for chunk in range(self.n_chunks):
                chunks[key_of(chunk)] = (*chunks.get(key_of(chunk), ()), chunk)
            object.__setattr__(self, name, MappingProxyType(chunks))

    def tiles(self, label: str) -> tuple[Tile, ...]:
        """Places of those elements of a tensor that this rank has, one in each chunk."""
        own = (part for rank, part in self.cut(label) if rank == self.rank)
        return tuple(Tile(part.chunk, part.start, part.tensor_start, part.stop - part.start) for part in own)

    def cut(self, label: str) -> Iterator[tuple[int, Part]]:
        """The parts of a tensor, in order, each with the rank that has it in its share of the chunk."""
        for chunk, start, stop, tensor_start in self.whole.parts(label):
            for rank in range(start // self.chunk_numel, -(-stop // self.chunk_numel)):
                begin = rank * self.chunk_numel
                first, last = max(start - begin, 0), min(stop - begin, self.chunk_numel)
                yield rank, Part(chunk, first, last, tensor_start + first + begin - start)

    def block_of(self, chunk: int) -> str:
        """The block whose tensors a chunk has; "" where they are of none."""
        return self._group_of[chunk].block

    def group_of(self, chunk: int) -> str:
        """The group that a chunk is gathered with: that of its block, and apart from it of what stays fp32 whole."""
        return self.block_of(chunk) + _WHOLE * self.is_whole(chunk)

    def weight_units(self, label: str) -> tuple[PlaneRef, ...]:
        """The shares of all chunks that are gathered where the tensor is used."""
        return tuple(PlaneRef(chunk, WEIGHT) for chunk in self.chunks_in[self.group(label)])

    def block(self, label: str) -> str:
        """The block that a tensor is of; "" where it is of none."""
        return self.block_of(self.slices[label].chunk)

    def group(self, label: str) -> str:
        """The group whose chunks are gathered where a tensor is used."""
        return self.group_of(self.slices[label].chunk)

    def offset(self, label: str) -> int:
        """The place of a tensor's first element in the chunks of its group, gathered one after the other."""
        place = self.whole.slices[label]
        return self.chunks_in[self.group(label)].index(place.chunk) * self.whole.chunk_numel + place.offset

    def group_numel(self, group: str) -> int:
        """Elements of a group, gathered."""
        return len(self.chunks_in[group]) * self.whole.chunk_numel

    def __reduce__(self) -> tuple[Any, ...]:
        return shard_of, (self.whole, self.rank, self.size)


def shard_of(layout: Layout, rank: int, size: int) -> ShardLayout:
    """The layout of what one of so many ranks keeps. LayoutError: there is no such rank, chunks cannot be cut evenly, or tensors are in tiles."""
    if not 0 <= rank < size:
        raise LayoutError(f"rank {rank} of {size}")
    if layout.chunk_numel % size:
        raise LayoutError(
            f"chunks of {layout.chunk_numel} elements cannot be cut evenly over {size} ranks: give Options(chunk_size=) a multiple of {size}"
        )
    if any(place.tiles for place in layout.slices.values()):
        raise LayoutError("tensors in tiles cannot be cut over ranks: leave Options(tile_rows=) out")
    runs = tuple(Run(chunk, 1, tuple(one.name for one in layout.tensors_in(chunk))) for chunk in range(layout.n_chunks))
    slices = {name: Slice(name, place.chunk, 0, place.numel) for name, place in layout.slices.items()}
    return ShardLayout(layout.chunk_numel // size, runs, slices, layout.groups, whole=layout, rank=rank, size=size)
