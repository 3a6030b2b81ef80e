"""The ranks of a square mesh, and how a tensor is cut over them.

A rank (i, j) of q x q is in row i and column j. A line is named by what varies along it: over `rows` (the ranks of one column) i varies, over
`cols` j does. Blocks are as `torch.chunk` cuts, so those at the end may be smaller, or empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from patrickstar.errors import ConfigError
from patrickstar.parallel.group import MeshGroup, Wait
from patrickstar.step.mesh_ranks import Place


@dataclass(frozen=True, slots=True)
class Grid:
    """A square mesh as this rank sees it. `rows`: the ranks over which the row varies; `cols`: those over which the column does; `members`: all."""

    q: int
    rows: MeshGroup
    cols: MeshGroup
    members: tuple[int, ...] = ()

    @property
    def place(self) -> Place:
        """The row and column of this rank."""
        return self.rows.rank, self.cols.rank

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Grid:
        """The grid of a mesh. Raises ConfigError where it has not two dimensions of one size."""
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2 or mesh.size(0) != mesh.size(1):
            raise ConfigError(
                f'2D parallelism takes a mesh of two dimensions of equal size, as mesh["row", "col"]; got {mesh}'
            )
        rows, cols = (MeshGroup.along(mesh, dim, name=name) for dim, name in enumerate(("row", "col")))
        return cls(mesh.size(0), rows, cols, tuple(mesh.mesh.flatten().tolist()))

    @property
    def everyone(self) -> MeshGroup:
        """All ranks, to agree on something; they have no process group."""
        return MeshGroup(f"{self.rows.name}, {self.cols.name}", self.members, self.rows.rank * self.q + self.cols.rank)

    def within(self, layer: str) -> Grid:
        """A view of these ranks, whose errors name a layer."""
        return replace(self, rows=replace(self.rows, layer=layer), cols=replace(self.cols, layer=layer))


class BlockTile(NamedTuple):
    """A part of a tensor: the first place whose block has it, and where it lies in the block."""

    place: Place
    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def of(self, block: Tensor) -> Tensor:
        """A view of what of a block it is."""
        return block.view(len(block), math.prod(block.shape[1:]))[self.rows, self.columns]


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to cut a parameter into blocks.

    Attributes:
        shape: of the whole. rows, cols: the dimension that is cut over each line; None: every rank of that line has the same.
        parts: the dimension cut over `cols` has so many parts, and a block is a piece of each: queries, keys and values of one matrix.
    """

    shape: tuple[int, ...]
    rows: int | None
    cols: int | None
    parts: int = 1

    def block(self, whole: Tensor, grid: Grid) -> Tensor:
        """The block of a whole tensor that is this rank's, a tensor of its own."""
        if self.rows is not None:
            whole = piece(whole, self.rows, grid.rows.rank, grid.q)
        if self.cols is not None:
            dim, j = self.cols, grid.cols.rank
            whole = torch.cat([piece(part, dim, j, grid.q) for part in whole.chunk(self.parts, dim)], dim)
        return whole.clone(memory_format=torch.contiguous_format)

    def first(self, place: Place) -> Place:
        """The first place that has what this one has."""
        i, j = place
        return 0 if self.rows is None else i, 0 if self.cols is None else j

    def strips(self, q: int, numel: int) -> Iterator[list[BlockTile]]:
        """The whole, of which other dimensions than the first count as one, by tiles: some rows of about so many elements, from left to right."""
        most = max(1, numel // max(1, math.prod(self.shape[1:])))
        for row, first, size in self._pieces(0, q):
            for start in range(first, first + size, most):
                rows = slice(start, min(start + most, first + size))
                yield [
                    BlockTile(
                        (column, row) if self.cols == 0 or self.rows == 1 else (row, column),
                        rows,
                        slice(at, at + width),
                    )
                    for column, at, width in self._pieces(1, q)
                ]

    def _pieces(self, dim: int, q: int) -> list[tuple[int, int, int]]:
        """The pieces of a dimension, in order: place along the line that cuts it, 0 where none does; first element in the block there; size."""
        if dim not in (self.rows, self.cols):
            return [(0, 0, math.prod(self.shape[dim : dim + 1]))]
        parts = self.parts if dim == self.cols else 1
        sizes = chunk_sizes(self.shape[dim] // parts, q)
        return [(place, part * size, size) for part in range(parts) for place, size in enumerate(sizes)]

    def whole(self, block: Tensor, grid: Grid) -> Tensor:
        """The whole tensor of which all ranks have blocks, on each of them."""
        if self.cols is not None:
            pieces = gather(block, self.cols, grid.cols, chunk_sizes(self.shape[self.cols], grid.q))
            of_parts = zip(*(piece.chunk(self.parts, self.cols) for piece in pieces), strict=True)
            block = torch.cat([one for part in of_parts for one in part], self.cols)
        if self.rows is not None:
            block = torch.cat(
                gather(block, self.rows, grid.rows, chunk_sizes(self.shape[self.rows], grid.q)), self.rows
            )
        return block


def chunk_sizes(size: int, q: int) -> list[int]:
    """Sizes of the q blocks of a dimension, as `torch.chunk` cuts it; those that it leaves out are empty."""
    most = -(-size // q)
    return [max(0, min(most, size - place * most)) for place in range(q)]


def piece(tensor: Tensor, dim: int, place: int, q: int) -> Tensor:
    """The block of a dimension that belongs to a place of q."""
    return tensor.split(chunk_sizes(tensor.shape[dim], q), dim)[place]


Source = tuple[Tensor, int, MeshGroup]
"""A rank's own block, the dimension whose size differs along a line, and the line."""


def panels(sizes: Sequence[int], *sources: Source) -> Iterator[list[Tensor]]:
    """The blocks of the ranks along lines, place by place, one of each source; those of the next place are under way while these are used.

    A block is there until the one after the next is asked for: what is received lies in two buffers in turn.
    """
    sources = tuple((own.contiguous(), dim, line) for own, dim, line in sources)
    shapes = [[[*own.shape[:dim], size, *own.shape[dim + 1 :]] for size in sizes] for own, dim, _ in sources]
    buffers = [
        [own.new_empty(math.prod(shape[0])) for _ in sizes[1:3]]
        for (own, *_), shape in zip(sources, shapes, strict=True)
    ]

    def begin(place: int) -> list[tuple[Tensor, Wait]]:
        begun = []
        for (own, _, line), shape, both in zip(sources, shapes, buffers, strict=True):
            panel = own
            if place != line.rank:
                both.reverse()
                panel = both[0][: math.prod(shape[place])].view(shape[place])
            begun.append((panel, line.broadcast(panel, place)))
        return begun

    under_way = begin(0)
    for place in range(len(sizes)):
        here, under_way = under_way, begin(place + 1) if place + 1 < len(sizes) else []
        for _, wait in here:
            wait()
        yield [panel for panel, _ in here]


def own_sums(line: MeshGroup, partials: Iterator[list[Tensor]]) -> list[Tensor]:
    """Sums over a line of what its ranks compute for each place, those for this rank's. One is summed while the next is computed."""
    own: list[Tensor] = []
    waiting: list[Wait] = []
    for place, partial in enumerate(partials):
        begun = [line.reduce(each, place) for each in partial]
        for wait in waiting:
            wait()
        waiting = begun
        if place == line.rank:
            own = partial
    for wait in waiting:
        wait()
    return own


def gather(own: Tensor, dim: int, line: MeshGroup, sizes: Sequence[int]) -> list[Tensor]:
    """The blocks of all ranks along a line, which differ in one dimension."""
    return [panel.clone() for (panel,) in panels(sizes, (own, dim, line))]
