"""How the lists of rows are found: covering arrays, always the same. `python -m tests.parity.cover` writes them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from tests.parity.matrix import (
    DIMENSIONS,
    MESHES_FILE,
    OF_MESHES,
    OF_RANKS,
    PAIRS,
    PAIRS_FILE,
    RANKS_FILE,
    TILED,
    WIDE_FILE,
    Row,
    Value,
    allowed,
    allowed_rows,
)
from tests.sampling import cover

Goal = tuple[tuple[str, Value], ...]

_QUICK = ["function", "scalars", "branches", "conv", "tied", "one-block", "strided", "autocast", "tower", "gpt2"]

_FP32: dict[str, Value] = {"precision": "fp32", "tile_rows": None}
_OF_MESH = (*(name for name in DIMENSIONS if name not in ("step", "tile_rows")), "mesh", "method")
_OTHERS = tuple(name for name in DIMENSIONS if name not in _FP32)


def every(*combined: tuple[str, ...]) -> Callable[[Row], Iterator[Goal]]:
    """The goals of covering all combinations of values of these dimensions."""

    def goals(row: Row) -> Iterator[Goal]:
        for names in combined:
            yield tuple((name, getattr(row, name)) for name in names)

    return goals


def shuffled(row: Row) -> int:
    """A fixed order without pattern, so that rows of equal gain come from all models alike."""
    return zlib.crc32(str(row).encode())


def quick_first(row: Row) -> tuple[int, bool, int]:
    """Sorts rows that take little time before others."""
    return row.accumulation, row.checkpointing != "none", (*_QUICK, row.model).index(row.model)


def in_order(row: Row) -> tuple[int | str, ...]:
    """Sorts rows of one model, and of those the ones that share an oracle, next to each other."""
    return (
        *(list(values).index(getattr(row, name)) for name, values in DIMENSIONS.items()),
        row.world,
        row.mesh,
        row.method,
    )


def pairs() -> list[Row]:
    """Every pair of values of two dimensions: in the rows that are checked in, and in others where these lack some."""
    goals = every(*combinations(DIMENSIONS, 2))
    met = {goal for row in PAIRS for goal in goals(row)}
    rows = sorted(allowed_rows(), key=shuffled)
    more = cover(rows, lambda row: (goal for goal in goals(row) if goal not in met))
    return sorted([*PAIRS, *more], key=in_order)


def few(rows: Sequence[Row]) -> list[Row]:
    """Of rows that have every pair, some that have every model, and every pair of values of two other dimensions."""
    others = tuple(name for name in DIMENSIONS if name != "model")
    return cover(rows, every(("model",), *combinations(others, 2)))


def ranks() -> list[Row]:
    """Of several ranks: every model on each number of them, and every pair of values of two other dimensions."""
    rows = allowed_rows({**DIMENSIONS, **OF_RANKS}, step="deferred", tile_rows=None)
    others = tuple(name for name in (*DIMENSIONS, *OF_RANKS) if name != "model")
    return sorted(cover(sorted(rows, key=shuffled), every(("model", "world"), *combinations(others, 2))), key=in_order)


def few_ranks(rows: Sequence[Row]) -> list[Row]:
    """Of these, a few, of quick models, that have every number of ranks, precision, budget and kind of machine, clipping and `no_sync` or not."""
    quick = ("scalars", "function", "tied", "conv")
    few = sorted((row for row in rows if row.model in quick), key=lambda row: quick.index(row.model))
    return cover(few, every(*((name,) for name in ("world", "precision", "budget", "tier", "clipping", "no_sync"))))


def meshes() -> list[Row]:
    """Of ranks that share batches: every method on each mesh and with each model, and every pair of values of two dimensions."""
    rows = allowed_rows({**DIMENSIONS, **OF_RANKS, **OF_MESHES}, step="deferred", tile_rows=None, no_sync=False)
    return sorted(
        cover(sorted(rows, key=shuffled), every(("model", "mesh", "method"), *combinations(_OF_MESH, 2))), key=in_order
    )


def few_meshes(rows: Sequence[Row]) -> list[Row]:
    """Of these, a few that have every method, every mesh, and every way of checkpointing, precision, budget and kind of machine."""
    return cover(sorted(rows, key=quick_first), every(*((name,) for name in _OF_MESH if name != "eviction")))


def wide() -> list[Row]:
    """What pairs leave out that has been seen to matter, but for what they have anyway."""
    fp32 = _in_fp32()
    rows = [*fp32, *_in_16_bits(fp32), *_in_tiles(fp32)]
    assert all(map(allowed, rows))
    return sorted(set(rows) - set(pairs()), key=in_order)


def _in_fp32() -> list[Row]:
    """Pairs, every triple of model, budget and tier, and every way of training by some model."""
    rows = sorted(allowed_rows(**_FP32), key=shuffled)
    goals = every(*combinations(_OTHERS, 2), ("model", "budget", "tier"), _OTHERS[1:])
    return sorted(cover(rows, goals), key=in_order)


def _in_16_bits(fp32: Sequence[Row]) -> list[Row]:
    """Of every model and checkpointing a row in each 16-bit type, and some of the hardest."""
    first: dict[tuple[str, str], Row] = {}
    for row in fp32:
        first.setdefault((row.model, row.checkpointing), row)
    unchecked = [row for row in first.values() if row.checkpointing == "none"]
    hard = Row("gpt2", "reentrant", 4, True, "deferred", "next-use", "minimum", "cpu+disk")
    at_once = Row("bert", "none", 1, False, "in_backward", "next-use", "minimum", "cpu+disk")
    return [
        *(replace(row, precision="bf16") for row in first.values()),
        replace(hard, precision="bf16"),
        replace(at_once, precision="bf16"),
        Row("gpt2", "none", 1, False, "deferred", "next-use", "minimum", "emulated", "bf16"),
        Row("llama", "non-reentrant", 4, True, "deferred", "lru", "between", "emulated", "bf16"),
        *(replace(row, precision="fp16", step="deferred") for row in first.values() if row.model != "autocast"),
        replace(hard, precision="fp16"),
        Row("llama", "none", 4, True, "deferred", "next-use", "minimum", "cpu+disk", "fp16"),
        *(replace(row, precision="bf16-fp32") for row in first.values()),
        *(replace(row, precision="fp16-fp32", step="deferred") for row in unchecked),
        replace(hard, precision="bf16-fp32"),
        replace(at_once, precision="bf16-fp32"),
    ]


def _in_tiles(fp32: Sequence[Row]) -> list[Row]:
    """A row of each model that has weights to cut: of the first its first, of the second its fourth, and so on; and some of the hardest."""
    of_model = [[row for row in fp32 if row.model == model] for model in TILED]
    varied = [rows[(3 * number) % len(rows)] for number, rows in enumerate(of_model)]
    return [
        *(replace(row, tile_rows=24) for row in varied),
        Row("gpt2", "reentrant", 4, True, "deferred", "next-use", "minimum", "cpu+disk", tile_rows=24),
        Row("tied", "none", 1, False, "in_backward", "lru", "minimum", "emulated", tile_rows=24),
        Row("llama", "non-reentrant", 1, False, "in_backward", "next-use", "minimum", "cpu+disk", tile_rows=7),
        Row("bert", "none", 4, True, "deferred", "next-use", "minimum", "emulated", "bf16", 24),
        Row("t5", "reentrant", 1, False, "in_backward", "next-use", "between", "emulated", "bf16", 24),
        Row("llama", "none", 1, True, "deferred", "next-use", "minimum", "cpu+disk", "fp16", 24),
        Row("gpt2", "non-reentrant", 4, False, "deferred", "next-use", "minimum", "emulated", "bf16-fp32", 24),
    ]


if __name__ == "__main__":
    PAIRS_FILE.write_text("".join(f"{row}\n" for row in pairs()))
    WIDE_FILE.write_text("".join(f"{row}\n" for row in wide()))
    RANKS_FILE.write_text("".join(f"{row}\n" for row in ranks()))
    MESHES_FILE.write_text("".join(f"{row}\n" for row in meshes()))
