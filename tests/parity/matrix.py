"""The rows of the parity matrix: what is run, and what can be run at all.

Four lists, checked in as text and computed anew by `test_matrix.py` in `make test-full` (`cover.py`):

(1) `PAIRS`: every pair of values of two dimensions that any allowed row can have stands in a row. Rows once chosen stay as long as they are
    allowed, since their budgets and plans are known; what they lack is added. Of these, `make test` runs a few (`cover.few`) in
    which every model stands, and every pair of two other dimensions.
(2) `WIDE`: every model at every budget on every kind of machine, every way of training there is, and every model
    with every checkpointing in each 16-bit type.
(3) `RANKS`: rows of several ranks, in which every model runs on each number of them, and every pair of values of two other dimensions. Of these,
    `make test` runs a few that have every value of most dimensions.
(4) `MESHES`: rows of ranks that have parts of the same batch, in which every method runs on each mesh that it can, and every pair of values of two
    other dimensions. Of these, too, `make test` runs a few.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Final

from tests.parity.zoo import CASES

Value = str | int | bool | None


@dataclass(frozen=True, slots=True)
class Row:
    """One training run of the matrix. Prints as `gpt2-none-x1-noclip-deferred-lru-fits-emulated-fp16-fp32-tiles24`, and parses back."""

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
    """What weights are kept in, and behind a hyphen what computes where that is another type."""
    tile_rows: int | None = None
    world: int = 1
    """Number of ranks."""
    no_sync: bool = False
    """Whether ranks add the gradients of several backwards before those of all ranks are added."""
    mesh: str = ""
    """Sizes of `dp` and `cp`, or of `dp`, `row` and `col`, where ranks have parts of the same batch."""
    method: str = ""
    """How they share it."""

    def __str__(self) -> str:
        clip = "clip" if self.clipping else "noclip"
        parts = (self.model, self.checkpointing, f"x{self.accumulation}", clip, self.step, self.eviction)
        end = [] if self.precision == "fp32" else [self.precision]
        end += [] if self.tile_rows is None else [f"tiles{self.tile_rows}"]
        end += [] if self.world == 1 else [f"world{self.world}"]
        end += ["nosync"] if self.no_sync else []
        end += [f"mesh{self.mesh}", self.method] if self.mesh else []
        return "-".join((*parts, self.budget, self.tier, *end))

    @classmethod
    def parse(cls, text: str) -> Row:
        """The row that prints as `text`.

        Raises:
            ValueError: no row prints so.
        """
        found = _ROW.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no row of the parity matrix")
        parts: dict[str, Any] = found.groupdict()
        tiles = parts["tile_rows"]
        parts |= {"accumulation": int(parts["accumulation"]), "clipping": parts["clipping"] == "clip"}
        parts |= {"precision": parts["precision"] or "fp32", "tile_rows": None if tiles is None else int(tiles)}
        parts |= {"world": int(parts["world"] or 1), "no_sync": parts["no_sync"] is not None}
        parts |= {name: parts[name] or "" for name in ("mesh", "method")}
        return cls(**parts)


_ROW: Final = re.compile(
    r"(?P<model>.+?)-(?P<checkpointing>none|non-reentrant|reentrant)-x(?P<accumulation>\d+)-(?P<clipping>clip|noclip)"
    r"-(?P<step>deferred|in_backward)-(?P<eviction>next-use|lru)-(?P<budget>fits|between|minimum)"
    r"-(?P<tier>emulated\+disk|emulated|cpu\+disk)(?:-(?P<precision>(?:bf16|fp16)(?:-fp32)?))?(?:-tiles(?P<tile_rows>\d+))?(?:-world(?P<world>\d+))?(?:-(?P<no_sync>nosync))?"
    r"(?:-mesh(?P<mesh>[\dx]+)-(?P<method>[a-z0-9]+))?"
)


DIMENSIONS: Final[Mapping[str, Sequence[Value]]] = {
    "model": tuple(CASES),
    "checkpointing": ("none", "non-reentrant", "reentrant"),
    "accumulation": (1, 4),
    "clipping": (False, True),
    "step": ("deferred", "in_backward"),
    "eviction": ("next-use", "lru"),
    "budget": ("fits", "between", "minimum"),
    "tier": ("emulated", "cpu+disk", "emulated+disk"),
    "precision": ("fp32", "bf16", "bf16-fp32", "fp16", "fp16-fp32"),
    "tile_rows": (None, 24, 7),
}
OF_RANKS: Final[Mapping[str, Sequence[Value]]] = {"world": (2, 3, 4), "no_sync": (False, True)}
"""What rows of several ranks have besides; the others are of one."""

OF_MESHES: Final[Mapping[str, Sequence[Value]]] = {
    "model": ("gpt2", "llama"),
    "world": (2, 4),
    "mesh": ("1x2", "2x2", "1x4", "1x2x2"),
    "method": ("ring", "contiguous", "rsa", "ulysses", "2d"),
}
"""What rows have besides whose ranks share a batch: rings in zigzag or contiguous parts, other methods, blocks. Their models have no dropout."""

assert [field.name for field in fields(Row)] == list({**DIMENSIONS, **OF_RANKS, **OF_MESHES}), (
    "a row lists its dimensions in their order"
)

# The models that have weights of more rows than a tile.
TILED: Final = (
    *("gpt2", "llama", "bert", "t5", "vit", "mixtral", "albert", "lstm", "encoder", "held", "tied"),
    *("long-embedding", "branches", "adapted", "thawed", "tower", "penalised"),
)


def allowed(row: Row) -> bool:
    """What can be run at all, and what shows something."""
    if row.checkpointing not in CASES[row.model].checkpointing:
        return False
    if row.step == "in_backward" and (row.accumulation > 1 or row.clipping or row.precision.startswith("fp16")):
        return False  # it promises one backward a step, no clipping and no loss scale
    if row.model == "autocast" and row.precision == "fp16":
        return False  # autocast to bf16 inside of an fp16 model is an error in PyTorch
    if row.tile_rows is not None and row.model not in TILED:
        return False
    if row.world > 1 and not _runs_over_ranks(row):
        return False
    if row.mesh and not _shares_batches(row):
        return False
    # With all of it on the device no third tier takes part: that row is the one of two tiers.
    return not (row.tier == "emulated+disk" and row.budget == "fits")


def _runs_over_ranks(row: Row) -> bool:
    # In "branches" batches say which blocks are called, and ranks call the same.
    if row.step == "in_backward" or row.tile_rows is not None or row.model == "branches":
        return False
    # No plan has gradients that wait for those of other ranks.
    return not row.no_sync or (row.accumulation > 1 and row.budget == "fits")


def _shares_batches(row: Row) -> bool:
    return (
        (row.method == "2d") == (row.mesh.count("x") == 2) and row.world == prod(sizes_of(row.mesh)) and not row.no_sync
    )


def sizes_of(mesh: str) -> tuple[int, ...]:
    """Sizes of the dimensions of a mesh."""
    return tuple(map(int, mesh.split("x")))


def allowed_rows(dimensions: Mapping[str, Sequence[Value]] = DIMENSIONS, **fixed: Value) -> Iterator[Row]:
    """Every row that could stand in the matrix, in the order of `dimensions`; those that are given have that one value."""
    for values in product(*((fixed[name],) if name in fixed else values for name, values in dimensions.items())):
        row = Row(*values)  # type: ignore[arg-type]
        if allowed(row):
            yield row


def _read(file: Path) -> tuple[Row, ...]:
    return tuple(map(Row.parse, file.read_text().split()))


PAIRS_FILE: Final = Path(__file__).with_name("pairs.txt")
MESHES_FILE: Final = Path(__file__).with_name("meshes.txt")
WIDE_FILE: Final = Path(__file__).with_name("wide.txt")
RANKS_FILE: Final = Path(__file__).with_name("ranks.txt")
PAIRS: Final = _read(PAIRS_FILE)
WIDE: Final = _read(WIDE_FILE)
RANKS: Final = _read(RANKS_FILE)
MESHES: Final = _read(MESHES_FILE)
