"""Shards: what each of several ranks keeps of every chunk, an even share of all of its planes.

A chunk is cut in as many pieces of one size as there are ranks, in rank order. A tensor goes across the cuts: a rank has the parts of it that lie in
its own pieces, and where they lie is all that tells one rank's shard from another's.
"""

from __future__ import annotations

from dataclasses import dataclass

from patrickstar.core.layout import Layout, Part, Piece
from patrickstar.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Shards:
    """The shares of one rank in the chunks of a layout.

    Attributes:
        rank: whose, from 0 on. size: number of ranks.
    """

    layout: Layout
    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise LayoutError(f"rank {self.rank} of {self.size}")
        if self.layout.chunk_numel % self.size:
            raise LayoutError(
                f"chunks of {self.layout.chunk_numel} elements cannot be cut evenly over {self.size} ranks: "
                f"give Options(chunk_size=) a multiple of {self.size}"
            )

    @property
    def numel(self) -> int:
        """Elements of a chunk that a rank keeps."""
        return self.layout.chunk_numel // self.size

    @property
    def span(self) -> slice:
        """Where they lie in any chunk."""
        return slice(self.rank * self.numel, (self.rank + 1) * self.numel)

    def of(self, rank: int) -> Shards:
        """The shares of another rank."""
        return Shards(self.layout, rank, self.size)

    def parts(self, label: str) -> tuple[Part, ...]:
        """A tensor's parts in this rank's shares, chunk by chunk; `start` and `stop` count from the beginning of the share."""
        cut = (self._cut(part.start, part.stop, part.tensor_start) for part in self.layout.parts(label))
        return tuple(
            Part(part.chunk, *piece) for part, piece in zip(self.layout.parts(label), cut, strict=True) if piece
        )

    def tensors_in(self, chunk: int) -> tuple[Piece, ...]:
        """The pieces of tensors in this rank's share of a chunk, by rising `start`, which counts from the beginning of the share."""
        cut = (
            (piece.name, self._cut(piece.start, piece.stop, piece.tensor_start))
            for piece in self.layout.tensors_in(chunk)
        )
        return tuple(Piece(name, *piece) for name, piece in cut if piece)

    def _cut(self, start: int, stop: int, tensor_start: int) -> tuple[int, int, int] | None:
        """Elements of a chunk as far as they are in the share: (start, stop, tensor_start) there."""
        span = self.span
        first, last = max(start, span.start), min(stop, span.stop)
        return (first - span.start, last - span.start, tensor_start + first - start) if first < last else None
