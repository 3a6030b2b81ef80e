"""The tables of two papers as formulas, and their figures of memory beside what the formulas give: `python benchmarks/papers.py` prints these.

Ring Self-Attention (arXiv:2105.13120) and Optimus (arXiv:2104.05343). What a rank sends and holds here is `patrickstar.parallel.costs`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from patrickstar.errors import ConfigError, nearest
from patrickstar.parallel.costs import LIVE, STATES, PhaseBytes, memory

BERT_BASE: Final = MappingProxyType({"hidden": 768, "heads": 12, "layers": 12, "vocabulary": 30522})
BERT_LARGE: Final = MappingProxyType({"hidden": 1024, "heads": 16, "layers": 24, "vocabulary": 30522})
_OPTIMUS: Final = MappingProxyType({"hidden": 8192, "heads": 128, "layers": 24})


def linear_2d(q: int, batch: int, tokens: int, inputs: int, outputs: Sequence[int], *, element: int = 2) -> PhaseBytes:
    """Bytes that each rank of q x q sends for linear layers with one input: (q-1)/q^2 of its elements and of the weights', and twice that backward.

    Where q does not divide the batch: a rank of the first row, which has the most.

    Raises:
        ConfigError: features that do not divide by q.
    """
    if inputs % q or sum(outputs) % q:
        raise ConfigError(f"{inputs} and {sum(outputs)} features do not divide by {q}")
    rows = -(-batch // q)
    forward = (q - 1) * (rows * tokens * (inputs // q) + inputs // q * (sum(outputs) // q)) * element
    return PhaseBytes(forward, 2 * forward)


def stem_elements(
    system: str, ranks: int, batch: int, tokens: int, hidden: int, *, broadcast: str = "ring"
) -> tuple[float, float]:
    """Elements that a rank sends for one layer, forward and backward with recomputing: table 1 of Optimus.

    "tensor": 4(p-1)/p BLH, and twice that. "optimus": a factor times 7BLH + 12H^2, and three times that: log2(p)/(2q) where whole panels
    go down a "tree", as in the paper, and (q-1)/p where each rank passes on its part ("ring").
    """
    _known("system", system, ("tensor", "optimus"))
    _known("broadcast", broadcast, ("ring", "tree"))
    whole = batch * tokens * hidden
    if system == "tensor":
        return 4 * (ranks - 1) / ranks * whole, 8 * (ranks - 1) / ranks * whole
    q = _root(ranks)
    forward = ((q - 1) / ranks if broadcast == "ring" else math.log2(ranks) / (2 * q)) * (7 * whole + 12 * hidden**2)
    return forward, 3 * forward


def tokens_where_2d_sends_less(ranks: int, hidden: int, *, training: bool = False) -> float:
    """Tokens of a batch (B L) above which 2D sends less than 1D: 12h/(4q-3) forward. `training`: a whole step with recomputing, 12h/(3q-4)."""
    q = _root(ranks)
    return 12 * hidden / ((3 * q - 4) if training else (4 * q - 3))


def tokens_where_sequence_is_smaller(
    block: str, hidden: int, *, ranks: int, layers: int = 1, sharded: bool = False
) -> float:
    """Tokens of a batch (B L) above which a block takes less memory with the sequence cut than with 1D tensor parallelism.

    "mlp": 32H; "attention": 16AZ (RSA, tables 1 and 2). `sharded`: states are cut, too, and only the weights of the layer that runs are
    whole: 8H N/((N-1) layers), or 4H.
    """
    _known("block", block, ("mlp", "attention"))
    matrices = 8 if block == "mlp" else 4
    return matrices * hidden * (ranks / ((ranks - 1) * layers) if sharded else STATES)


def block_memory(  # noqa: PLR0917  (as the tables have them)
    block: str, system: str, ranks: int, batch: int, tokens: int, hidden: int, heads: int, *, projection: int = 0
) -> dict[str, float]:
    """Elements of one block on one rank, its states and its activations: the rows of RSA's tables 1 to 3.

    Args:
        block: "mlp", "attention" or "linformer", whose keys and values are projected to `projection` rows. system: "tensor" or "rsa".
    """
    _known("block", block, ("mlp", "attention", "linformer"))
    _known("system", system, ("tensor", "rsa"))
    own, matrices = batch * tokens * hidden / ranks, 8 if block == "mlp" else 4
    scores = 0 if block == "mlp" else batch * heads * tokens**2 / ranks
    if block == "linformer":
        if system == "tensor":
            raise ConfigError('"linformer" is a row of "rsa" only')
        # The table prints 2AZH where the accounting of the others gives 16AZH: four matrices, four states each.
        scores = batch * heads * tokens * projection / ranks
        return {"states": 2 * hidden**2, "activations": 3 * own + 2 * batch * projection * hidden, "scores": scores}
    if system == "tensor":
        return {"states": STATES * matrices * hidden**2 / ranks, "activations": (4 + ranks) * own, "scores": scores}
    return {"states": STATES * matrices * hidden**2, "activations": 5 * own, "scores": scores}


def largest(elements: float, fits: Callable[[int], Mapping[str, float]]) -> int:
    """The largest number, of rows or of tokens, with which the parts that `fits` gives take no more than so many elements; 0: none does."""
    low, high = 0, 1
    while sum(fits(high).values()) <= elements:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sum(fits(middle).values()) <= elements else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """A published figure beside the formulas' one. `published`: None where it is ours. `note`: assumptions, and what would explain the rest."""

    what: str
    published: float | None
    formula: float
    note: str

    def __str__(self) -> str:
        published = "-" if self.published is None else f"{self.published:g}x"
        return f"{self.what}: published {published}, formula {self.formula:.1f}x ({self.note})"


def comparisons(card_bytes: float = 16e9, element: int = 4) -> list[PublishedFigure]:
    """The papers' figures of memory on cards of 16 GB, and what their formulas and ours give for them."""

    def rows(system: str, ranks: int, model: Mapping[str, Any], **more: bool) -> int:
        return largest(card_bytes / element, lambda batch: memory(system, ranks, batch, 512, **model, **more))

    def length(system: str, ranks: int, model: Mapping[str, Any], batch: int) -> int:
        return largest(card_bytes / element, lambda tokens: memory(system, ranks, batch, tokens, **model))

    held = "states of embeddings counted, no head; 1D held more than its table says: masks of dropout, norms"
    ours = "states cut over the ranks; 1D as its table says"
    base, large = rows("tensor", 12, BERT_BASE), rows("tensor", 16, BERT_LARGE)
    long = length("tensor", 12, BERT_BASE, 64)
    square, line = rows("optimus", 64, _OPTIMUS), rows("tensor", 64, _OPTIMUS, recompute=True)
    live = (
        f"{square} and {line} rows of 512 tokens, published 480 and 60; 1D spreads its checkpoints and has {LIVE * element:g} bytes "
        "a token and feature of the layer that runs, all on each rank"
    )
    large_length = length("rsa", 64, BERT_LARGE, 16) / length("tensor", 16, BERT_LARGE, 16)
    return [
        PublishedFigure("batch of BERT Base, RSA on 64, 1D on 12", 13.7, rows("rsa", 64, BERT_BASE) / base, held),
        PublishedFigure("length of BERT Base, RSA on 64, 1D on 12", 3.0, length("rsa", 64, BERT_BASE, 64) / long, held),
        PublishedFigure("batch of BERT Large, RSA on 16, 1D on 16", 2.7, rows("rsa", 16, BERT_LARGE) / large, held),
        PublishedFigure("batch of BERT Large, RSA on 64, 1D on 16", 10.2, rows("rsa", 64, BERT_LARGE) / large, held),
        PublishedFigure("length of BERT Large, RSA on 64, 1D on 16", 2.0, large_length, held),
        PublishedFigure("batch of BERT Base, ring on 64, 1D on 12", None, rows("ring", 64, BERT_BASE) / base, ours),
        PublishedFigure(
            "length of BERT Base, ring on 64, 1D on 12", None, length("ring", 64, BERT_BASE, 64) / long, ours
        ),
        PublishedFigure("batch at hidden 8192, Optimus on 64, 1D on 64", 8.0, square / line, live),
    ]


def _known(what: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise ConfigError(f"{what} is {given!r}, which is none of {', '.join(known)}{nearest(given, known)}")


def _root(ranks: int) -> int:
    q = math.isqrt(ranks)
    if q * q != ranks:
        raise ConfigError(f"2D takes q x q ranks, and {ranks} is no square")
    return q


def main() -> int:
    print(*comparisons(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
