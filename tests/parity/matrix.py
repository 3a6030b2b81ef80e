"""The rows of the parity matrix: a covering array, computed afresh at each collection and always the same.

Guarantees, proven by `test_matrix.py`:

(1) Every pair of values of two dimensions that any allowed row can have stands in a row.
(2) So does every triple of model, budget and tier: each model runs at each budget on each kind of machine.
(3) So does every combination of everything but the model, for some model.
(4) No row breaks a rule of `allowed`.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import combinations, product

from tests.parity.zoo import CASES

__all__ = [
    "BF16_ROWS",
    "DIMENSIONS",
    "FP16_ROWS",
    "ROWS",
    "STRENGTHS",
    "TABLE_ROWS",
    "TILED_ROWS",
    "WIDENED_ROWS",
    "Row",
    "allowed",
    "allowed_rows",
    "cover",
    "targets",
]


@dataclass(frozen=True, slots=True)
class Row:
    """One training run of the matrix."""

    model: str
    checkpointing: str
    accumulation: int
    clipping: bool
    step: str
    eviction: str
    budget: str
    """ "fits": everything; "between"; "minimum": the least that runs."""
    tier: str
    """ "emulated": device over host; "cpu+disk": host over disk; "emulated+disk": all three."""
    precision: str = "fp32"
    tile_rows: int | None = None
    tables: bool = False

    def __str__(self) -> str:
        clip = "clip" if self.clipping else "noclip"
        parts = (self.model, self.checkpointing, f"x{self.accumulation}", clip, self.step, self.eviction)
        end = [] if self.precision == "fp32" else [self.precision]
        end += [] if self.tile_rows is None else [f"tiles{self.tile_rows}"]
        end += ["tables"] if self.tables else []
        return "-".join((*parts, self.budget, self.tier, *end))


DIMENSIONS: Mapping[str, Sequence[str | int | bool]] = {
    "model": tuple(CASES),
    "checkpointing": ("none", "non-reentrant", "reentrant"),
    "accumulation": (1, 4),
    "clipping": (False, True),
    "step": ("deferred", "in_backward"),
    "eviction": ("next-use", "lru"),
    "budget": ("fits", "between", "minimum"),
    "tier": ("emulated", "cpu+disk", "emulated+disk"),
}

# Sets of dimensions of which every combination of values is covered: all pairs, what each model must face, and every
# way of training there is.
STRENGTHS: tuple[tuple[str, ...], ...] = (
    *combinations(DIMENSIONS, 2),
    ("model", "budget", "tier"),
    tuple(name for name in DIMENSIONS if name != "model"),
)

Target = tuple[tuple[str, str | int | bool], ...]


def allowed(row: Row) -> bool:
    """What can be run at all, and what shows something."""
    if row.checkpointing not in CASES[row.model].checkpointing:
        return False
    if row.step == "in_backward" and (row.accumulation > 1 or row.clipping):
        return False  # it promises one backward a step and no clipping
    # With all of it on the device no third tier takes part: that row is the one of two tiers.
    return not (row.tier == "emulated+disk" and row.budget == "fits")


def allowed_rows() -> Iterator[Row]:
    """Every row that could stand in the matrix, in the order of `DIMENSIONS`."""
    for values in product(*DIMENSIONS.values()):
        row = Row(*values)  # type: ignore[arg-type]
        if allowed(row):
            yield row


def targets(row: Row) -> Iterator[Target]:
    """The combinations that this row covers."""
    for names in STRENGTHS:
        yield tuple((name, getattr(row, name)) for name in names)


def cover(rows: Sequence[Row], goals: Callable[[Row], Iterator[Target]] = targets) -> list[Row]:
    """Few of the rows that together have every goal any of them has.

    Greedily the row with most new goals, the first of equals. What a row would add only shrinks as others are taken, so
    a stale gain is an upper bound, and most rows need no second look.
    """
    numbers: dict[Target, int] = {}
    masks = []
    for row in rows:
        mask = 0
        for goal in goals(row):
            mask |= 1 << numbers.setdefault(goal, len(numbers))
        masks.append(mask)
    covered, everything, chosen = 0, (1 << len(numbers)) - 1, []
    heap = [(-mask.bit_count(), index) for index, mask in enumerate(masks)]
    heapq.heapify(heap)
    while covered != everything:
        _, index = heapq.heappop(heap)
        gain = (masks[index] & ~covered).bit_count()
        if heap and (-gain, index) > heap[0]:
            heapq.heappush(heap, (-gain, index))
            continue
        chosen.append(index)
        covered |= masks[index]
    return [rows[index] for index in chosen]


def by_oracle(row: Row) -> tuple[object, ...]:
    """Sorts rows that share an oracle run, and then those that share a search for budgets, next to each other."""
    places = [list(values) for values in DIMENSIONS.values()]
    keys = [place.index(value) for place, value in zip(places, astuple(row), strict=False)]
    return tuple(keys)


def shuffled(row: Row) -> int:
    """A fixed order without pattern, so that rows of equal gain come from all models alike."""
    return zlib.crc32(str(row).encode())


ROWS: tuple[Row, ...] = tuple(sorted(cover(sorted(allowed_rows(), key=shuffled)), key=by_oracle))


def first_of_each(rows: Sequence[Row]) -> list[Row]:
    """For every model and kind of checkpointing one row: budgets, tiers and the rest vary with them."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        found.setdefault((row.model, row.checkpointing), row)
    return list(found.values())


BF16_ROWS: tuple[Row, ...] = (
    *(replace(row, precision="bf16") for row in first_of_each(ROWS)),
    Row("gpt2", "none", 1, False, "deferred", "next-use", "minimum", "emulated", "bf16"),
    Row("gpt2", "reentrant", 4, True, "deferred", "next-use", "minimum", "cpu+disk", "bf16"),
    Row("llama", "non-reentrant", 4, True, "deferred", "lru", "between", "emulated", "bf16"),
    Row("bert", "none", 1, False, "in_backward", "next-use", "minimum", "cpu+disk", "bf16"),
)


def of_one_backward(rows: Sequence[Row], precision: str) -> list[Row]:
    """The same rows in fp16, which cannot update in backward."""
    deferred = [replace(row, precision=precision, step="deferred") for row in rows]
    return list(dict.fromkeys(deferred))


FP16_ROWS: tuple[Row, ...] = (
    # Autocast to bf16 inside of an fp16 model is an error in PyTorch.
    *of_one_backward([row for row in first_of_each(ROWS) if row.model != "autocast"], "fp16"),
    Row("gpt2", "reentrant", 4, True, "deferred", "next-use", "minimum", "cpu+disk", "fp16"),
    Row("llama", "none", 4, True, "deferred", "next-use", "minimum", "cpu+disk", "fp16"),
)

# 16 bits in storage, fp32 in arithmetic.
WIDENED_ROWS: tuple[Row, ...] = (
    *(replace(row, precision="bf16-fp32") for row in first_of_each(ROWS)),
    *of_one_backward([row for row in first_of_each(ROWS) if row.checkpointing == "none"], "fp16-fp32"),
    Row("gpt2", "reentrant", 4, True, "deferred", "next-use", "minimum", "cpu+disk", "bf16-fp32"),
    Row("bert", "none", 1, False, "in_backward", "next-use", "minimum", "cpu+disk", "bf16-fp32"),
)

# Weights in tiles: the models that have some, each with another of its rows, so that budgets, tiers and ways of training vary.
TILED: tuple[str, ...] = (
    *("gpt2", "llama", "bert", "t5", "vit", "mixtral", "albert", "lstm", "encoder", "held", "tied"),
    *("long-embedding", "branches", "adapted", "thawed", "tower", "penalised"),
)


def in_tiles(row: Row, rows: int = 24) -> Row:
    """The same row with weights in tiles."""
    return replace(row, tile_rows=rows)


def one_of_each(models: Sequence[str]) -> list[Row]:
    """A row of each model: of the first its first, of the second its second, and so on."""
    of_model = {model: [row for row in ROWS if row.model == model] for model in models}
    return [rows[(3 * number) % len(rows)] for number, rows in enumerate(of_model.values())]


TILED_ROWS: tuple[Row, ...] = (
    *map(in_tiles, one_of_each(TILED)),
    in_tiles(Row("gpt2", "reentrant", 4, True, "deferred", "next-use", "minimum", "cpu+disk")),
    in_tiles(Row("tied", "none", 1, False, "in_backward", "lru", "minimum", "emulated")),
    in_tiles(Row("llama", "non-reentrant", 1, False, "in_backward", "next-use", "minimum", "cpu+disk"), 7),
    in_tiles(Row("bert", "none", 4, True, "deferred", "next-use", "minimum", "emulated", "bf16")),
    in_tiles(Row("t5", "reentrant", 1, False, "in_backward", "next-use", "between", "emulated", "bf16")),
    in_tiles(Row("llama", "none", 1, True, "deferred", "next-use", "minimum", "cpu+disk", "fp16")),
    in_tiles(Row("gpt2", "non-reentrant", 4, False, "deferred", "next-use", "minimum", "emulated", "bf16-fp32")),
)

# Tables of which only rows leave the host.
TABLE_ROWS: tuple[Row, ...] = tuple(
    replace(row, tables=True)
    for row in (
        Row("llama", "none", 1, False, "deferred", "next-use", "minimum", "emulated"),
        Row("llama", "reentrant", 4, True, "deferred", "lru", "between", "emulated", "bf16"),
        Row("mixtral", "non-reentrant", 1, False, "in_backward", "next-use", "minimum", "emulated"),
        Row("lstm", "none", 4, True, "deferred", "next-use", "minimum", "emulated"),
        Row("encoder", "none", 1, True, "deferred", "next-use", "between", "emulated+disk"),
        Row("long-embedding", "none", 4, False, "deferred", "next-use", "minimum", "emulated"),
        Row("long-embedding", "none", 1, True, "deferred", "lru", "minimum", "emulated", "fp16-fp32"),
        Row("adapted", "none", 4, True, "deferred", "next-use", "minimum", "emulated"),
    )
)

assert [f.name for f in fields(Row)][:-3] == list(DIMENSIONS), "a row lists its dimensions in their order"
