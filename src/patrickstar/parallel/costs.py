"""Bytes and elements of the ways to share a step over ranks, as formulas: those of the papers, and ours beside them. Nothing here needs torch.

Ring Self-Attention (RSA): arXiv 2105.13120, tables 1 to 3. Optimus: arXiv 2104.05343, table 1, and the arenas of its code.
B batch, L tokens, H hidden, Z heads of size A (H = ZA), N or p = q x q ranks; u = B Z L/N A: elements of a rank's queries.

Memory is in elements of one size; with Adam a parameter has four (itself, its gradient, two optimizer states). No time follows from any of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from patrickstar.config.kinds import choice, refuse
from patrickstar.errors import ConfigError

METHODS: Final = ("ring", "rsa", "ulysses", "rsa-published")
SYSTEMS: Final = ("tensor", "rsa", "ring", "optimus")
STATES: Final = 4
LIVE: Final = 8.5
"""Elements a token and feature of the layer that runs in 1D tensor parallelism: 34 bytes, all of them on every rank."""


@dataclass(frozen=True, slots=True)
class PhaseBytes:
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
) -> PhaseBytes:
    """Bytes that each of N ranks sends for one attention whose sequence is cut over them.

    "ring", "rsa": 2(N-1) u Zkv/Z and 4(N-1) u Zkv/Z, of which half are sums of gradients. "ulysses": (2 + 2 max(Zkv, N)/Z)(N-1)/N u, twice.
    "rsa-published": 2(N-1) u and 6(N-1) u: gradients of K and V are summed whole, on each rank.

    Args:
        tokens: of the whole sequence. element: bytes of one that travels. accumulate: bytes of one of a sum, at least as many as `element` has.
    Raises:
        ConfigError: another method, or numbers that do not divide.
    """
    refuse(choice(*METHODS).problems("method", method), of="attention")
    _divides(ranks, tokens=tokens)
    _divides(kv_heads, heads=heads)
    wide = max(element, accumulate)
    kv = batch * kv_heads * (tokens // ranks) * head_size
    hops = 2 * (ranks - 1) * kv
    if method == "ulysses":
        _divides(ranks, heads=heads)
        both = 2 * batch * (tokens // ranks) * head_size * (heads + max(kv_heads, ranks)) * (ranks - 1) // ranks
        return PhaseBytes(both * element, both * element)
    if method == "rsa-published":
        return PhaseBytes(hops * element, 3 * hops * element)
    return PhaseBytes(hops * element, hops * (element + wide))


def summa(
    q: int, batch: int, tokens: int, hidden: int, layers: int = 1, recompute: bool = False, element: int = 2
) -> PhaseBytes:
    """Bytes that each rank of q x q sends for the matrices of GPT-2's layers: (q-1)/q^2 (7BLH + 12H^2) each, and twice that backward.

    Vectors, norms, embedding and head are not in it, as in the paper. Where q does not divide the batch: a rank of the first row, which has the most.
    `recompute`: the forward runs again before each backward.

    Raises:
        ConfigError: `hidden` does not divide by q.
    """
    _divides(q, hidden=hidden)
    rows, width = -(-batch // q), hidden // q
    forward = layers * (q - 1) * (7 * rows * tokens * width + 12 * width**2) * element
    return PhaseBytes(forward, (3 if recompute else 2) * forward)


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

    "tensor": 1D tensor parallelism as in RSA's tables; with `recompute`, checkpoints are spread, and each rank has `LIVE` elements a token and
    feature of the layer that runs. "rsa": tables 1 and 2, all states on each rank. "ring": ours, blocks of scores that are not kept, and states cut
    over the ranks. "optimus": the arenas of its code, with activation checkpointing of every layer.

    Args:
        vocabulary: of the embedding, whose states are counted. head: logits, and their gradient, are counted too.
        sharded: states are cut over the ranks, and weights and gradients of the layer that runs are whole; None: so for "ring".
    Raises:
        ConfigError: another system, or ranks of "optimus" that are no square.
    """
    refuse(choice(*SYSTEMS).problems("system", system), of="memory")
    whole, own = batch * tokens * hidden, batch * tokens * hidden / ranks
    scores = batch * heads * tokens**2 / ranks
    states = STATES * (12 * layers * hidden**2 + vocabulary * hidden)
    logits = 2 * batch * tokens * vocabulary / ranks if head else 0
    if system == "optimus":
        if math.isqrt(ranks) ** 2 != ranks:
            raise ConfigError(f"2D takes q x q ranks, and {ranks} is no square")
        of_head = (batch * tokens * vocabulary + vocabulary * hidden) / ranks if head else 0
        return {
            "workspace": max(4 * own + 4 * hidden**2 / ranks, of_head),
            "outputs of a layer": 9 * own,
            "gradients of a layer's inputs": 7 * own,
            "scores": 2 * scores,
            "checkpoints": layers * own,
            "gradient between layers": own,
            "states": states / ranks,
        }
    if system == "tensor" and recompute:
        kept = {"checkpoints": layers * own, "live layer": LIVE * whole, "scores": 2 * scores}
    elif system == "tensor":
        kept = {"activations": layers * (8 + 2 * ranks) * own, "scores": layers * scores}
    elif system == "rsa":
        kept = {"activations": layers * 10 * own, "scores": layers * scores}
    else:  # a number a token and head of the softmax; K, V, their successors and sums of gradients, of the layer that runs
        kept = {"activations": layers * 10 * own, "scores": layers * scores / tokens, "blocks that travel": 9 * own}
    if system == "tensor":
        return kept | {"states": states / ranks, "logits": logits}
    if sharded or (sharded is None and system == "ring"):
        return kept | {"states": states / ranks, "weights and gradients of a layer": 24 * hidden**2, "logits": logits}
    return kept | {"states": states, "logits": logits}


def _divides(by: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if size % by:
            raise ConfigError(f"{name} {size} does not divide by {by}")
