"""The layout of tensors in chunks: deterministic, and equal on all ranks.

A chunk is a fixed number of elements. Tensors follow each other in registration order (next-fit). A tensor that no
chunk can hold starts a run of adjacent chunks, and later tensors may continue in the tail of the run's last chunk.
A tensor in tiles is laid out tile by tile, each as if it were a tensor; a tile's *label* is the tensor's name and the
tile's number in brackets, and wherever a label is asked for, a tensor's name will do.
The layout holds for every plane alike: a slice has the same place in weights, gradients and moments.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from patrickstar.core.planes import WEIGHT, PlaneRef
from patrickstar.errors import LayoutError

# 64 bytes of fp32: whole vectors for every kernel, so that no tensor but a last one has a tail (design, section 4).
ALIGNMENT: Final = 16


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A parameter's name, shape, whether it is trained, and whether it stays fp32 whole. Parameters that are tied appear once.

    `tile_numel`: elements of a tile, where the parameter need not be resident as a whole; the last tile may have fewer. `block`: over ranks
    the path of the block that alone owns it, as tensors of several share no chunk there; "" for what no block owns, or several do.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    whole: bool = False
    tile_numel: int | None = None
    block: str = ""

    def kind(self) -> tuple[bool, bool, str]:
        """Flags of a tensor, and its block: (stays fp32 whole, is frozen, block). Tensors of one kind share chunks."""
        return self.whole, not self.trainable, self.block

    @property
    def numel(self) -> int:
        """Elements: 1 for a scalar, 0 where a dim is 0."""
        return math.prod(self.shape)

    def tiles(self) -> list[int]:
        """Elements of each of the tensor's tiles, in order: of the whole tensor, where it has none."""
        tile = self.tile_numel or self.numel
        return [min(tile, self.numel - start) for start in range(0, self.numel, tile)] if self.numel else [0]


class Tile(NamedTuple):
    """`numel` elements of a tensor from its element `tensor_start` on: `offset` elements from the start of the run whose head is `chunk`."""

    chunk: int
    offset: int
    tensor_start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Place of a tensor: `chunk` is the head of its run, `offset` counts elements from the start of the run.

    `tiles`: where the tiles lie of a tensor that has several. `chunk` and `offset` are then the first one's.
    """

    name: str
    chunk: int
    offset: int
    numel: int
    tiles: tuple[Tile, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """`length` adjacent chunks from `head` on, and the tensors in them, in registration order."""

    head: int
    length: int
    tensors: tuple[str, ...]


class Part(NamedTuple):
    """The elements `[start, stop)` of a chunk, which are a tensor's from its element `tensor_start` on."""

    chunk: int
    start: int
    stop: int
    tensor_start: int


class Piece(NamedTuple):
    """The elements `[start, stop)` of a chunk seen from the chunk: whose, and from which of its elements on."""

    name: str
    start: int
    stop: int
    tensor_start: int


class Group(NamedTuple):
    """Chunks from `head` on, and the kind of their tensors, in the order of `TensorSpec.kind`."""

    head: int
    whole: bool = False
    frozen: bool = False
    block: str = ""

    def __str__(self) -> str:
        words = {self.block: bool(self.block), "fp32 whole": self.whole, "frozen": self.frozen}
        return " and ".join(word for word, holds in words.items() if holds)


@dataclass(frozen=True, slots=True)
class Layout:
    """Runs of chunks that partition `[0, n_chunks)`, and the slice of every tensor, in registration order.

    `groups`: tensors of one kind have chunks of their own; each group goes up to the next one's head. `has_frozen`: whether some were not trained.
    """

    chunk_numel: int
    runs: tuple[Run, ...]
    slices: Mapping[str, Slice]
    groups: tuple[Group, ...] = (Group(0),)

    has_frozen: bool = field(init=False, repr=False, compare=False)
    _run_of: tuple[Run, ...] = field(init=False, repr=False, compare=False)
    _group_of: tuple[Group, ...] = field(init=False, repr=False, compare=False)
    _pieces: tuple[tuple[Piece, ...], ...] = field(init=False, repr=False, compare=False)
    _labels: Mapping[str, tuple[str, Tile]] = field(init=False, repr=False, compare=False)
    _parts: dict[str, tuple[Part, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "slices", MappingProxyType(dict(self.slices)))
        labels = {
            f"{name}[{index}]": (name, tile)
            for name, place in self.slices.items()
            for index, tile in enumerate(place.tiles)
        }
        object.__setattr__(self, "_labels", labels)
        parts = {name: tuple(_parts_of(self.tiles(name), self.chunk_numel)) for name in self.slices}
        for label, (_, tile) in labels.items():
            parts[label] = tuple(_parts_of([tile], self.chunk_numel, tile.tensor_start))
        object.__setattr__(self, "_parts", parts)
        object.__setattr__(self, "_run_of", tuple(run for run in self.runs for _ in range(run.length)))
        object.__setattr__(self, "has_frozen", any(group.frozen for group in self.groups))
        heads = [group.head for group in self.groups]
        found = tuple(self.groups[bisect.bisect_right(heads, chunk) - 1] for chunk in range(len(self._run_of)))
        object.__setattr__(self, "_group_of", found)
        pieces: list[list[Piece]] = [[] for _ in self._run_of]
        for name in self.slices:
            for part in self._parts[name]:
                pieces[part.chunk].append(Piece(name, part.start, part.stop, part.tensor_start))
        object.__setattr__(self, "_pieces", tuple(map(tuple, pieces)))

    @property
    def n_chunks(self) -> int:
        """Chunks of all runs together."""
        return len(self._run_of)

    def is_whole(self, chunk: int) -> bool:
        """Tells whether a chunk's tensors stay fp32 whole."""
        return self._group_of[chunk].whole

    def is_frozen(self, chunk: int) -> bool:
        """Tells whether a chunk's tensors were not trained when the layout was made."""
        return self._group_of[chunk].frozen

    @property
    def model_numel(self) -> int:
        """Elements of all tensors, without padding."""
        return sum(part.numel for part in self.slices.values())

    @property
    def largest_numel(self) -> int:
        """Elements of the largest tensor."""
        return max((place.numel for place in self.slices.values()), default=0)

    @property
    def padding(self) -> float:
        """Share of the chunks' space that holds no element of a tensor."""
        return 1 - self.model_numel / (self.n_chunks * self.chunk_numel)

    def owner(self, label: str) -> str:
        """The tensor that a tile is of."""
        return self._labels[label][0] if label in self._labels else label

    def leaves(self, label: str) -> tuple[str, ...]:
        """The labels of a tensor's tiles; of what has none, the label itself."""
        place = self.slices.get(label)
        tiles = () if place is None else place.tiles
        return tuple(f"{label}[{index}]" for index in range(len(tiles))) or (label,)

    def tiles(self, label: str) -> tuple[Tile, ...]:
        """Places of a tensor's tiles: one, where the tensor has none."""
        if label in self._labels:
            return (self._labels[label][1],)
        place = self.slices[label]
        return place.tiles or (Tile(place.chunk, place.offset, 0, place.numel),)

    def weight_units(self, label: str) -> tuple[PlaneRef, ...]:
        """The units that must be resident for the whole of a tensor's weight to be used: one, but for a tensor in tiles."""
        return tuple(PlaneRef(chunk, WEIGHT) for chunk in dict.fromkeys(tile.chunk for tile in self.tiles(label)))

    def weight_place(self, part: Part) -> tuple[PlaneRef, int]:
        """The weight unit that a part lies in, and from which of the unit's elements on."""
        head = self._run_of[part.chunk].head
        return PlaneRef(head, WEIGHT), (part.chunk - head) * self.chunk_numel + part.start

    def run_of(self, chunk: int) -> Run:
        """The run a chunk belongs to."""
        return self._run_of[chunk]

    def slots(self, ref: PlaneRef) -> int:
        """Adjacent slots a unit takes: its run's length for a weight, else one."""
        return self._run_of[ref.chunk].length if ref.plane == WEIGHT else 1

    def parts(self, label: str) -> tuple[Part, ...]:
        """A tensor's pieces chunk by chunk, for the planes of one slot a unit; none for a tensor without elements.

        Of a tile, `tensor_start` counts from the tile's first element.
        """
        return self._parts[label]

    def tensors_in(self, chunk: int) -> tuple[Piece, ...]:
        """Pieces of tensors in this one chunk, by rising `start`: (name, start, stop, tensor_start)."""
        return self._pieces[chunk]

    def units(self, planes: Iterable[str]) -> Iterator[PlaneRef]:
        """Every unit of `planes`: by chunk, then in the order of `planes`; of a weight, the heads of runs only."""
        planes = tuple(planes)
        for chunk, run in enumerate(self._run_of):
            for plane in planes:
                if plane != WEIGHT or run.head == chunk:
                    yield PlaneRef(chunk, plane)

    def __str__(self) -> str:
        lines = [f"layout of {self.n_chunks} chunks of {self.chunk_numel} elements, padding {self.padding:.2%}"]
        lines += [f"{group} from c{group.head} on" for group in self.groups if str(group)]
        for run in self.runs:
            lines.append(f"c{run.head}" + (f" x{run.length}" if run.length > 1 else ""))
            for name in run.tensors:
                for tile in self.tiles(name):
                    if tile.chunk == run.head:
                        start = f" from {tile.tensor_start}" if tile.tensor_start else ""
                        lines.append(f"  {tile.offset}+{tile.numel} {name}{start}")
        return "\n".join(lines)

    def digest(self) -> str:
        """Equal for equal layouts: 16 hexadecimal digits over the text."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def __reduce__(self) -> tuple[Callable[..., Layout], tuple[Any, ...]]:
        # A mapping proxy neither pickles nor copies.
        return Layout, (self.chunk_numel, self.runs, dict(self.slices), self.groups)


def _parts_of(tiles: Sequence[Tile], chunk_numel: int, since: int = 0) -> Iterator[Part]:
    for tile in tiles:
        at, stop = tile.offset, tile.offset + tile.numel
        before = tile.tensor_start - since - tile.offset
        while at < stop:
            ordinal, start = divmod(at, chunk_numel)
            numel = min(stop - at, chunk_numel - start)
            yield Part(tile.chunk + ordinal, start, start + numel, before + at)
            at += numel


def aligned(numel: int) -> int:
    """The space a tensor of `numel` elements takes in a run."""
    return numel + -numel % ALIGNMENT


def in_groups(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Tensors of one kind after each other, blocks by their first tensor, and else in registration order."""
    first = {block: number for number, block in reversed(list(enumerate(spec.block for spec in specs)))}
    return sorted(specs, key=lambda spec: (spec.kind()[:2], first[spec.block]))


def build_layout(specs: Sequence[TensorSpec], *, chunk_numel: int) -> Layout:
    """The layout of tensors, in the order of `specs`, in chunks of `chunk_numel` elements.

    A tensor without elements takes no space; its slice is the start of the run it is registered in.

    Raises:
        LayoutError: no tensors, two of one name, a negative dim, or a chunk that is no multiple of the alignment.
    """
    _refuse_bad_input(specs, chunk_numel)
    runs: list[Run] = []
    slices: dict[str, Slice] = {}
    groups: list[Group] = []
    head = 0
    for kind, group in groupby(in_groups(specs), TensorSpec.kind):
        groups.append(Group(head, *kind))
        length, used, names = 1, 0, list[str]()
        for spec in group:
            tiles: list[Tile] = []
            for numel in spec.tiles():
                space = aligned(numel)
                if used + space > length * chunk_numel:
                    if used:
                        runs.append(Run(head, length, tuple(names)))
                        head, names = head + length, []
                    length, used = -(-space // chunk_numel), 0
                tiles.append(Tile(head, used if space else 0, sum(tile.numel for tile in tiles), numel))
                if spec.name not in names[-1:]:
                    names.append(spec.name)
                used += space
            first = tiles[0]
            in_tiles = tuple(tiles) if len(tiles) > 1 else ()
            slices[spec.name] = Slice(spec.name, first.chunk, first.offset, spec.numel, in_tiles)
        runs.append(Run(head, length, tuple(names)))
        head += length
    in_order = {spec.name: slices[spec.name] for spec in specs}
    return Layout(chunk_numel, tuple(runs), in_order, tuple(groups))


def _refuse_bad_input(specs: Sequence[TensorSpec], chunk_numel: int) -> None:
    if chunk_numel <= 0 or chunk_numel % ALIGNMENT:
        raise LayoutError(f"a chunk of {chunk_numel} elements: give a positive multiple of {ALIGNMENT}")
    if not specs:
        raise LayoutError("the model has no parameters: there is nothing to manage")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise LayoutError(f"two parameters are called {spec.name!r}: pass a tied parameter once")
        if any(dim < 0 for dim in spec.shape):
            raise LayoutError(f"{spec.name} has shape {spec.shape}: a dim is negative")
        seen.add(spec.name)
    labels = {f"{spec.name}[{index}]" for spec in specs for index in range(len(spec.tiles())) if len(spec.tiles()) > 1}
    for name in sorted(seen & labels):
        raise LayoutError(f"{name} is the name of a parameter and of a tile: give the parameter another name")
