"""Bytes and elements of the ways to share a step over ranks, as formulas: those of the papers, and ours beside them. Nothing here needs torch.

Ring Self-Attention: arXiv 2105.13120, tables 1 to 3. Optimus: arXiv 2104.05343, table 1 and section 3.2.2. In formulas: B batch, L tokens, H hidden, Z heads
of size A (H = ZA), N ranks, of which Optimus has q x q; u = B Z L/N A: elements of a rank's queries.

All memory is in elements of one size, and of the whole model on one rank: with Adam four of a parameter (itself, its gradient, two moments).
No time follows from any of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from patrickstar.errors import ConfigError, nearest

METHODS: Final = ("ring", "rsa", "ulysses", "rsa-published")
SYSTEMS: Final = ("tensor", "rsa", "ring", "optimus")
STATES: Final = 4
LIVE: Final = 8.5
"""Elements a token and feature of the layer that runs in 1D tensor parallelism: 34 bytes, all of them on every rank."""


@dataclass(frozen=True, slots=True)
class SentBytes:
    """Bytes that a rank sends in a forward and in a backward."""

    forward: int
    backward: int


def attention(
    method: str,
    ranks: int,
    batch: int,
    heads: int,
    kv_heads: int,
    tokens: int,
    head_size: int,
    element: int = 2,
    accumulate: int = 4,
) -> SentBytes:
    """Bytes that each of N ranks sends for one attention whose sequence is cut over them.

    "ring", "rsa": 2(N-1) u Zkv/Z and 4(N-1) u Zkv/Z; half of the latter are sums of gradients of K and V. "ulysses": (2 + 2 max(Zkv, N)/Z)(N-1)/N u, twice.
    "rsa-published": 2(N-1) u and 6(N-1) u, with all-reduces of whole gradients (table 2 of the paper counts them so).

    Args:
        tokens: of the whole sequence. element: bytes of one that travels. accumulate: bytes of one of a sum, at least as many as `element` has.
    Raises:
        ConfigError: another method, or numbers that do not divide.
    """
    _known("method", method, METHODS)
    _divides(ranks, tokens=tokens)
    _divides(kv_heads, heads=heads)
    wide = max(element, accumulate)
    kv = batch * kv_heads * (tokens // ranks) * head_size
    hops = 2 * (ranks - 1) * kv
    if method == "ulysses":
        _divides(ranks, heads=heads)
        both = 2 * batch * (tokens // ranks) * head_size * (heads + max(kv_heads, ranks)) * (ranks - 1) // ranks
        return SentBytes(both * element, both * element)
    if method == "rsa-published":
        return SentBytes(hops * element, 3 * hops * element)
    return SentBytes(hops * element, hops * (element + wide))


def linear_2d(q: int, batch: int, tokens: int, inputs: int, outputs: Sequence[int], *, element: int = 2) -> SentBytes:
    """Bytes that each rank of q x q sends for linear layers with one input: (q-1)/q^2 of its elements and of the weights', and twice that backward.

    Where q does not divide the batch: a rank of the first row, which has the most.

    Raises:
        ConfigError: features that do not divide by q.
    """
    _divides(q, inputs=inputs, outputs=sum(outputs))
    rows = -(-batch // q)
    forward = (q - 1) * (rows * tokens * (inputs // q) + inputs // q * (sum(outputs) // q)) * element
    return SentBytes(forward, 2 * forward)


def summa(
    q: int, batch: int, tokens: int, hidden: int, layers: int = 1, recompute: bool = False, element: int = 2
) -> SentBytes:
    """Bytes that each rank of q x q sends for the matrices of GPT-2's layers: (q-1)/q^2 (7BLH + 12H^2) each, and twice that backward.

    Vectors, norms, embedding and head are not in it, as in the paper. `recompute`: the forward runs again before each backward.
    """
    parts = ((1, 3), (1, 1), (1, 4), (4, 1))
    each = [linear_2d(q, batch, tokens, k * hidden, [n * hidden], element=element) for k, n in parts]
    forward = layers * sum(one.forward for one in each)
    return SentBytes(forward, (3 if recompute else 2) * forward)


def optimus_elements(ranks: int, batch: int, tokens: int, hidden: int, *, broadcast: str = "ring") -> tuple[float, float]:
    """Elements times the inverse of the bandwidth for one layer's forward, and for its backward with recomputing (Optimus, table 1).

    `broadcast`: "tree", as in the paper: log2(p)/(2 q) (7BLH + 12H^2); "ring", of which a rank sends its part only: (q-1)/q^2 of it. Backward is 3 times that.
    """
    _known("broadcast", broadcast, ("ring", "tree"))
    q = _root(ranks)
    factor = (q - 1) / ranks if broadcast == "ring" else math.log2(ranks) / (2 * q)
    forward = factor * (7 * batch * tokens * hidden + 12 * hidden**2)
    return forward, 3 * forward


def tensor_elements(ranks: int, batch: int, tokens: int, hidden: int) -> tuple[float, float]:
    """Elements that a rank of 1D tensor parallelism sends for one layer: 4(p-1)/p BLH forward, twice that backward with recomputing (Optimus, table 1)."""
    forward = 4 * (ranks - 1) / ranks * batch * tokens * hidden
    return forward, 2 * forward


def tokens_where_2d_sends_less(ranks: int, hidden: int, *, training: bool = False) -> float:
    """Tokens of a batch (B L) above which 2D sends less than 1D: 12h/(4q-3) forward. `training`: a whole step with recomputing, 12h/(3q-4)."""
    q = _root(ranks)
    return 12 * hidden / ((3 * q - 4) if training else (4 * q - 3))


def tokens_where_sequence_is_smaller(block: str, hidden: int, *, ranks: int, layers: int = 1, sharded: bool = False) -> float:
    """Tokens of a batch (B L) above which a block takes less memory with the sequence cut than with 1D tensor parallelism.

    "mlp": 32H; "attention": 16AZ (RSA, tables 1 and 2). `sharded`: states are cut over the ranks as well, and the weights of one layer are whole while it
    runs: what is left of these, over all layers, is 8H N/((N-1) layers), or 4H.
    """
    _known("block", block, ("mlp", "attention"))
    matrices = 8 if block == "mlp" else 4
    return matrices * hidden * (ranks / ((ranks - 1) * layers) if sharded else STATES)


def block_memory(
    block: str, system: str, ranks: int, batch: int, tokens: int, hidden: int, heads: int, *, projection: int = 0
) -> dict[str, float]:
    """Elements of one block on one rank, its states and its activations: the rows of RSA's tables 1 to 3.

    Args:
        block: "mlp", "attention" or "linformer", whose keys and values are projected to `projection` rows. system: "tensor" or "rsa".
    """
    _known("block", block, ("mlp", "attention", "linformer"))
    _known("system", system, ("tensor", "rsa"))
    features, whole = batch * tokens * hidden / ranks, batch * tokens * hidden
    if system == "tensor":
        if block == "linformer":
            raise ConfigError('"linformer" has a row for "rsa" only')
        states = STATES * (8 if block == "mlp" else 4) * hidden**2 / ranks
        scores = 0 if block == "mlp" else batch * heads * tokens**2 / ranks
        return {"states": states, "activations": 4 * features + whole, "scores": scores}
    if block == "mlp":
        return {"states": STATES * 8 * hidden**2, "activations": 5 * features, "scores": 0}
    if block == "attention":
        return {"states": STATES * 4 * hidden**2, "activations": 5 * features, "scores": batch * heads * tokens**2 / ranks}
    # The table prints 2AZH, where the accounting of the others gives 16AZH: four matrices, four states each.
    return {
        "states": 2 * hidden**2,
        "activations": 3 * features + 2 * batch * projection * hidden,
        "scores": batch * heads * tokens * projection / ranks,
    }


def memory(
    system: str,
    ranks: int,
    batch: int,
    tokens: int,
    hidden: int,
    heads: int,
    layers: int,
    *,
    vocabulary: int = 0,
    head: bool = False,
    sharded: bool | None = None,
    recompute: bool = False,
) -> dict[str, float]:
    """Elements of a model's step on one rank, by part.

    "tensor": 1D tensor parallelism, as in RSA's tables; with `recompute` checkpoints are spread over the ranks, and the layer that runs has `LIVE` elements
    a token and feature on each. "rsa": tables 1 and 2; states are whole on each rank. "ring": ours, with blocks of attention in place of strips, and states cut
    over the ranks. "optimus": the arenas of its code; every layer is recomputed.

    Args:
        vocabulary: of the embedding, whose states are counted; 0: none. head: logits, and their gradient, are counted too.
        sharded: whether states are cut over the ranks, in "rsa" and "ring", with the weights and gradients of a layer whole; None: as said above.
    Raises:
        ConfigError: another system, or ranks of "optimus" that are no square.
    """
    _known("system", system, SYSTEMS)
    if system == "optimus":
        return _optimus_memory(ranks, batch, tokens, hidden, heads, layers, vocabulary, head=head)
    features = batch * tokens * hidden
    states = STATES * (12 * layers * hidden**2 + vocabulary * hidden)
    parts: dict[str, float] = {}
    if system == "tensor" and recompute:
        parts |= {"checkpoints": layers * features / ranks, "live layer": LIVE * features}
        parts["scores"] = 2 * batch * heads * tokens**2 / ranks
    else:
        table = [block_memory(b, "rsa" if system == "ring" else system, ranks, batch, tokens, hidden, heads) for b in ("mlp", "attention")]
        parts["activations"] = layers * sum(block["activations"] for block in table)
        parts["scores"] = layers * sum(block["scores"] for block in table)
    if system == "ring":
        own = features / ranks
        # Of the softmax a number a token and head; blocks of K and V, their successors, sums of gradients: of the layer that runs.
        parts |= {"scores": layers * batch * heads * tokens / ranks, "blocks that travel": 9 * own}
    is_cut = system in {"tensor", "ring"} if sharded is None else sharded or system == "tensor"
    parts["states"] = states / ranks if is_cut else states
    if is_cut and system != "tensor":
        parts["layer's weights and gradients"] = 2 * 12 * hidden**2
    if head:
        parts["logits"] = 2 * batch * tokens * vocabulary / ranks
    return parts


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
class Comparison:
    """A published figure beside the formulas' one. `published`: None where it is ours. `note`: assumptions, and what would explain the rest."""

    what: str
    published: float | None
    formula: float
    note: str

    def __str__(self) -> str:
        published = "-" if self.published is None else f"{self.published:g}x"
        return f"{self.what}: published {published}, formula {self.formula:.1f}x ({self.note})"


def comparisons(card_bytes: float = 16e9, element: int = 4) -> list[Comparison]:
    """The papers' figures of memory on cards of 16 GB, and what their formulas and ours give for them."""
    room = card_bytes / element

    def rows(system: str, ranks: int, of: Mapping[str, Any], tokens: int) -> int:
        return largest(room, lambda batch: memory(system, ranks, batch, tokens, **of))

    def length(system: str, ranks: int, of: Mapping[str, Any], batch: int) -> int:
        return largest(room, lambda tokens: memory(system, ranks, batch, tokens, **of))

    held = "embeddings' states counted, no head; the baseline held more than its table says, dropout masks and norms"
    ours = "states cut over the ranks; against 1D on 12 cards by its formula"
    base_rows, base_length = rows("tensor", 12, BERT_BASE, 512), length("tensor", 12, BERT_BASE, 64)
    large_rows, large_length = rows("tensor", 16, BERT_LARGE, 512), length("tensor", 16, BERT_LARGE, 16)
    optimus = dict(hidden=8192, heads=128, layers=24)
    tensor = largest(room, lambda b: memory("tensor", 64, b, 512, **optimus, recompute=True))
    square = rows("optimus", 64, optimus, 512)
    return [
        Comparison("batch, BERT Base, RSA on 64 against 1D on 12", 13.7, rows("rsa", 64, BERT_BASE, 512) / base_rows, held),
        Comparison("length, BERT Base, RSA on 64 against 1D on 12", 3.0, length("rsa", 64, BERT_BASE, 64) / base_length, held),
        Comparison("batch, BERT Large, RSA on 16 against 1D on 16", 2.7, rows("rsa", 16, BERT_LARGE, 512) / large_rows, held),
        Comparison("batch, BERT Large, RSA on 64 against 1D on 16", 10.2, rows("rsa", 64, BERT_LARGE, 512) / large_rows, held),
        Comparison("length, BERT Large, RSA on 64 against 1D on 16", 2.0, length("rsa", 64, BERT_LARGE, 16) / large_length, held),
        Comparison("batch, BERT Base, ring on 64 against 1D on 12", None, rows("ring", 64, BERT_BASE, 512) / base_rows, ours),
        Comparison("length, BERT Base, ring on 64 against 1D on 12", None, length("ring", 64, BERT_BASE, 64) / base_length, ours),
        Comparison(
            "batch, hidden 8192, Optimus on 64 against 1D on 64",
            8.0,
            square / tensor,
            f"{square} against {tensor} rows of 512 tokens, published 480 against 60; 1D is taken to spread its checkpoints and to hold "
            f"{LIVE * element:g} bytes a token and feature of the layer that runs, all on each rank",
        ),
    ]


BERT_BASE: Final = MappingProxyType({"hidden": 768, "heads": 12, "layers": 12, "vocabulary": 30522})
BERT_LARGE: Final = MappingProxyType({"hidden": 1024, "heads": 16, "layers": 24, "vocabulary": 30522})


def _optimus_memory(
    ranks: int, batch: int, tokens: int, hidden: int, heads: int, layers: int, vocabulary: int, *, head: bool
) -> dict[str, float]:
    _root(ranks)
    features, matrix, words = batch * tokens * hidden / ranks, hidden**2 / ranks, vocabulary * hidden / ranks
    of_head = batch * tokens * vocabulary / ranks + words if head else 0
    return {
        "workspace": max(4 * features + 4 * matrix, of_head),
        "outputs of a layer": 9 * features,
        "gradients of a layer's inputs": 7 * features,
        "scores": 2 * batch * heads * tokens**2 / ranks,
        "checkpoints": layers * features,
        "gradient between layers": features,
        "states": STATES * (12 * layers * matrix + words),
    }


def _known(what: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise ConfigError(f"{what} is {given!r}, which is none of {', '.join(known)}{nearest(given, known)}")


def _divides(by: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if size % by:
            raise ConfigError(f"{name} {size} does not divide by {by}")


def _root(ranks: int) -> int:
    q = math.isqrt(ranks)
    if q * q != ranks:
        raise ConfigError(f"2D takes q x q ranks, and {ranks} is no square")
    return q
