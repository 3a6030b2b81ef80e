"""Which tensor lies where in which chunk: deterministic, and equal on all ranks.

A chunk is a fixed number of elements. Tensors follow each other in registration order (next-fit). A tensor that no
chunk can hold starts a run of adjacent chunks, and later tensors may continue in the tail of the run's last chunk.
The layout holds for every plane alike: a slice has the same place in weights, gradients and moments.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from patrickstar.core.plane import WEIGHT, PlaneRef
from patrickstar.core.spec import TensorSpec
from patrickstar.errors import LayoutError

# 64 bytes of fp32: whole vectors for every kernel, so that no tensor but a last one has a tail (design, section 4).
ALIGNMENT: Final = 16


@dataclass(frozen=True, slots=True)
class Slice:
    """Where a tensor lies: `chunk` is the head of its run, `offset` counts elements from the start of the run."""

    name: str
    chunk: int
    offset: int
    numel: int


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
    """Chunks from `head` on, of tensors that stay fp32 whole or do not, and are trained or are not."""

    head: int
    whole: bool = False
    frozen: bool = False

    def kind(self) -> tuple[bool, bool]:
        """As `TensorSpec.kind`."""
        return self.whole, self.frozen

    def __str__(self) -> str:
        return " and ".join([*(["fp32 whole"] if self.whole else []), *(["frozen"] if self.frozen else [])])


@dataclass(frozen=True, slots=True)
class Layout:
    """Runs of chunks that partition `[0, n_chunks)`, and the slice of every tensor, in registration order.

    `groups`: tensors of one kind have chunks of their own; each group goes up to the next one's head.
    """

    chunk_numel: int
    runs: tuple[Run, ...]
    slices: Mapping[str, Slice]
    groups: tuple[Group, ...] = (Group(0),)

    _run_of: tuple[Run, ...] = field(init=False, repr=False, compare=False)
    _group_of: tuple[Group, ...] = field(init=False, repr=False, compare=False)
    _pieces: tuple[tuple[Piece, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "slices", MappingProxyType(dict(self.slices)))
        object.__setattr__(self, "_run_of", tuple(run for run in self.runs for _ in range(run.length)))
        heads = [group.head for group in self.groups]
        found = tuple(self.groups[bisect.bisect_right(heads, chunk) - 1] for chunk in range(len(self._run_of)))
        object.__setattr__(self, "_group_of", found)
        pieces: list[list[Piece]] = [[] for _ in self._run_of]
        for name in self.slices:
            for part in self.parts(name):
                pieces[part.chunk].append(Piece(name, part.start, part.stop, part.tensor_start))
        object.__setattr__(self, "_pieces", tuple(map(tuple, pieces)))

    @property
    def alignment(self) -> int:
        """Every slice begins at a multiple of this many elements."""
        return ALIGNMENT

    @property
    def n_chunks(self) -> int:
        """Chunks of all runs together."""
        return len(self._run_of)

    def is_whole(self, chunk: int) -> bool:
        """Whether a chunk's tensors stay fp32 whole."""
        return self._group_of[chunk].whole

    def is_frozen(self, chunk: int) -> bool:
        """Whether a chunk's tensors were not trained when the layout was made."""
        return self._group_of[chunk].frozen

    @property
    def model_numel(self) -> int:
        """Elements of all tensors, without padding."""
        return sum(part.numel for part in self.slices.values())

    @property
    def padding(self) -> float:
        """Share of the chunks' space that holds no element of a tensor."""
        return 1 - self.model_numel / (self.n_chunks * self.chunk_numel)

    def weight_unit(self, name: str) -> PlaneRef:
        """The unit that must be resident for a tensor's weight to be used."""
        return PlaneRef(self.slices[name].chunk, WEIGHT)

    def run_of(self, chunk: int) -> Run:
        """The run a chunk belongs to."""
        return self._run_of[chunk]

    def slots(self, ref: PlaneRef) -> int:
        """Adjacent slots a unit takes: its run's length for a weight, else one."""
        return self._run_of[ref.chunk].length if ref.plane == WEIGHT else 1

    def parts(self, name: str) -> tuple[Part, ...]:
        """A tensor's pieces chunk by chunk, for the planes of one slot a unit; none for a tensor without elements."""
        place = self.slices[name]
        parts = []
        at, stop = place.offset, place.offset + place.numel
        while at < stop:
            ordinal, start = divmod(at, self.chunk_numel)
            numel = min(stop - at, self.chunk_numel - start)
            parts.append(Part(place.chunk + ordinal, start, start + numel, at - place.offset))
            at += numel
        return tuple(parts)

    def tensors_in(self, chunk: int) -> tuple[Piece, ...]:
        """What lies in this one chunk, by rising `start`: (name, start, stop, tensor_start)."""
        return self._pieces[chunk]

    def units(self, planes: Iterable[str]) -> Iterator[PlaneRef]:
        """Every unit of these planes: by chunk, then in the order of `planes`; of a weight, the heads of runs only."""
        planes = tuple(planes)
        for chunk, run in enumerate(self._run_of):
            for plane in planes:
                if plane != WEIGHT or run.head == chunk:
                    yield PlaneRef(chunk, plane)

    def __str__(self) -> str:
        lines = [f"layout of {self.n_chunks} chunks of {self.chunk_numel} elements, padding {self.padding:.2%}"]
        lines += [f"{group} from c{group.head} on" for group in self.groups if group.whole or group.frozen]
        for run in self.runs:
            lines.append(f"c{run.head}" + (f" x{run.length}" if run.length > 1 else ""))
            lines += [f"  {self.slices[name].offset}+{self.slices[name].numel} {name}" for name in run.tensors]
        return "\n".join(lines)

    def digest(self) -> str:
        """Equal for equal layouts: 16 hexadecimal digits over the text."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def __reduce__(self) -> tuple[Callable[..., Layout], tuple[Any, ...]]:
        return Layout, (
            self.chunk_numel,
            self.runs,
            dict(self.slices),
            self.groups,
        )  # a mapping proxy neither pickles nor copies


def aligned(numel: int) -> int:
    """The space a tensor of `numel` elements takes in a run."""
    return numel + -numel % ALIGNMENT


def build_layout(specs: Sequence[TensorSpec], *, chunk_numel: int) -> Layout:
    """The layout of these tensors, in their order, in chunks of `chunk_numel` elements.

    A tensor without elements takes no space; its slice is the start of the run it is registered in.

    Raises:
        LayoutError: no tensors, two of one name, a negative dim, or a chunk that is no multiple of the alignment.
    """
    _refuse_bad_input(specs, chunk_numel)
    runs: list[Run] = []
    slices: dict[str, Slice] = {}
    names: list[str] = []
    head, length, used = 0, 1, 0
    groups: list[Group] = []
    for spec in sorted(specs, key=TensorSpec.kind):  # stable: in registration order otherwise
        space = aligned(spec.numel)
        if not groups or groups[-1].kind() != spec.kind():
            if names:
                runs.append(Run(head, length, tuple(names)))
                head, names = head + length, []
                length, used = max(1, -(-space // chunk_numel)), 0
            groups.append(Group(head, *spec.kind()))
        if used + space > length * chunk_numel:
            if used:
                runs.append(Run(head, length, tuple(names)))
                head, names = head + length, []
            length, used = -(-space // chunk_numel), 0
        slices[spec.name] = Slice(spec.name, head, used if space else 0, spec.numel)
        names.append(spec.name)
        used += space
    runs.append(Run(head, length, tuple(names)))
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
