"""Ring attention: blocks of keys and values travel from rank to rank, and their outputs are merged by the log-sum-exps of their scores.

Each rank has c = L/N tokens: q, out [B, Z, c, A], k [B, Zk, c, A], v [B, Zk, c, Av], segments [B, c]; no tensor is longer. (arXiv 2310.01889)

(1) The next hop is under way while a block is computed. Two buffers, keys and values in one.
(2) Sums over blocks are in fp32 (fp64 in fp64), gradients that travel too: rounded block by block, errors would grow with the ring.
(3) Gradients of a rank's own keys stay at home; those of a stranger's begin at the first rank that has them, so that they travel N-1 hops, not N.
    Of its own block a rank computes a half while the first keys come, and the other half while the last gradients do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patrickstar.parallel.group import MeshGroup, Shift
from patrickstar.parallel.kernels import attend, attend_backward, sum_dtype
from patrickstar.parallel.layouts import SeenBlock, TokenLayout


@dataclass(frozen=True, slots=True)
class Ring:
    """Attention over a ring."""

    group: MeshGroup
    layout: TokenLayout
    is_causal: bool
    scale: float

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Tensor | None) -> Tensor:
        """The output for this rank's queries."""
        if query.stride(-1) != 1:  # which the kernel for CPUs takes for granted
            query = query.contiguous()
        return _RingAttention.apply(query, key, value, segments, self)

    def block(self, source: int, local: int) -> SeenBlock | None:
        """The part of what `source` has that this rank's queries see."""
        return self.layout.block(self.group.rank, source, local, is_causal=self.is_causal)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, ring: Ring) -> Tensor:
        out = lse = q.new_empty(0)
        for source, (pair, *ids) in travel(ring.group, [packed(k, v), *_present(segments)]):
            block = ring.block(source, q.shape[2])
            if block is None:
                continue
            keys, values = unpacked(pair, k, v)
            of_block, of_scores = attend(
                q[:, :, block.queries],
                keys[:, :, block.keys],
                values[:, :, block.keys],
                mask=mask_of(block, segments, ids),
                is_causal=block.is_causal,
                scale=ring.scale,
            )
            if source == ring.group.rank:  # the first, for all queries: each sees itself
                out, lse = of_block.to(sum_dtype(q.dtype)), of_scores
            else:
                merge(out[:, :, block.queries], lse[:, :, block.queries], of_block, of_scores)
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse, segments)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, segments = ctx.saved_tensors
        ring: Ring = ctx.ring
        dtype = sum_dtype(q.dtype)
        dq, home = torch.zeros_like(q, dtype=dtype), torch.zeros_like(packed(k, v), dtype=dtype)

        def gradients(block: SeenBlock, pair: Tensor, ids: Sequence[Tensor]) -> Sequence[Tensor]:
            keys, values = unpacked(pair, k, v)
            of_queries, *parts = attend_backward(
                grad_out[:, :, block.queries].contiguous(),
                q[:, :, block.queries],
                keys[:, :, block.keys],
                values[:, :, block.keys],
                out[:, :, block.queries].contiguous(),
                lse[:, :, block.queries].contiguous(),
                mask=mask_of(block, segments, ids),
                is_causal=block.is_causal,
                scale=ring.scale,
            )
            dq[:, :, block.queries] += of_queries
            return parts

        moving: Shift | None = None
        spare: Tensor | None = None
        at_once, later = ring.layout.halves(q.shape[2], is_causal=ring.is_causal)
        for source, (pair, *ids) in travel(ring.group, [packed(k, v), *_present(segments)]):
            is_own = source == ring.group.rank
            block = ring.block(source, q.shape[2])
            blocks = at_once if is_own else [] if block is None else [block]
            found = [(one, gradients(one, pair, ids)) for one in blocks]
            if is_own:
                sums = home
            elif moving is None:
                sums = torch.zeros_like(home)
            else:  # what the ranks before this one have of the same keys
                spare, (sums,) = moving.tensors[0], moving.wait()
            for one, parts in found:
                add(parts, one, unpacked(sums, k, v))
            if not is_own:
                moving = ring.group.shift([sums], [torch.empty_like(sums) if spare is None else spare])
        for one in later:
            add(gradients(one, packed(k, v), _present(segments)), one, unpacked(home, k, v))
        if moving is not None:
            home += moving.wait()[0]
        dk, dv = unpacked(home.to(k.dtype), k, v)
        return dq.to(q.dtype), dk, dv, None, None


def travel(group: MeshGroup, tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Ranks and their contiguous tensors, from this one on backwards. The next are under way while some are looked at; all are written over."""
    here, spare = list(tensors), [torch.empty_like(tensor) for tensor in tensors] if group.size > 1 else []
    for step in range(group.size):
        moving = group.shift(here, spare) if step < group.size - 1 else None
        yield (group.rank - step) % group.size, here
        if moving is not None:
            here, spare = moving.wait(), here


def merge(out: Tensor, lse: Tensor, of_block: Tensor, of_scores: Tensor) -> None:
    """Adds the attention to a block's keys to that of others, in place."""
    total = torch.logaddexp(lse, of_scores)
    out.mul_((lse - total).exp().unsqueeze(-1)).add_(of_block * (of_scores - total).exp().unsqueeze(-1))
    lse.copy_(total)


def add(parts: Sequence[Tensor], block: SeenBlock, sums: Sequence[Tensor]) -> None:
    """Adds gradients of a block's keys and values to those of all keys and values."""
    for part, of_all in zip(parts, sums, strict=True):
        of_all[:, :, block.keys] += part


def packed(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values in one buffer."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def unpacked(pair: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of such a buffer, in the shapes of this rank's own."""
    return pair[: k.numel()].view(k.shape), pair[k.numel() :].view(v.shape)


def mask_of(block: SeenBlock, segments: Tensor | None, ids: Sequence[Tensor]) -> Tensor | None:
    """The pairs [B, 1, n, m] of a block whose tokens are of one segment; `ids`: those of the keys, where there are any."""
    if segments is None:
        return None
    return (segments[:, block.queries, None] == ids[0][:, None, block.keys]).unsqueeze(1)


def _present(segments: Tensor | None) -> list[Tensor]:
    return [] if segments is None else [segments.clone()]
