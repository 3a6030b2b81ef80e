"""Ring Self-Attention (arXiv 2105.13120, section 3.2): exact softmax over strips, one for each query head and rank, as long as the sequence.

Each rank has c = L/N tokens: q, out [B, Z, c, A], k [B, Zk, c, A], v [B, Zk, c, Av], scores and weights [B, Z, c, L]. Keys travel for scores, then
values for the output; backward once more each. The paper adds up gradients of keys and values whole on each rank (all-reduce); here each rank gets
those of its own tokens (reduce-scatter), 6 (N-1) in place of 8 (N-1). Scores and sums are in fp32 (fp64 in fp64).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patrickstar.parallel.group import MeshGroup
from patrickstar.parallel.kernels import grouped, sum_dtype
from patrickstar.parallel.ring import travel


@dataclass(frozen=True, slots=True)
class Strips:
    """The strips of attention. Tokens are in contiguous parts over ranks."""

    group: MeshGroup
    is_causal: bool
    scale: float
    dropout: float = 0.0

    def blocks(self, *tensors: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """The columns of the strip that are a rank's tokens', and its tensors, rank by rank."""
        own, local = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors], tensors[0].shape[2]
        for source, theirs in travel(self.group, own):
            yield slice(source * local, (source + 1) * local), theirs

    def own_sums(self, pairs: Tensor, rows: Tensor, like: Tensor) -> Tensor:
        """Gradients of this rank's tokens, from those of all ranks' rows. `pairs`: a strip [B, Z, c, L]. `rows`: of it, by key head."""
        sums = torch.empty((self.group.size, *like.shape), dtype=rows.dtype, device=like.device)
        for part, of_rank in zip(pairs.split(like.shape[2], -1), sums, strict=True):
            torch.matmul(grouped(part.to(rows.dtype), like.shape[1]).mT, rows, out=of_rank)
        return self.group.scatter_sum(sums).to(like.dtype)


class StripAttention(torch.autograd.Function):
    """The output for this rank's queries. `mask`: [.., c, L], true where a query sees a key, or added to the scores."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, mask: Tensor | None, strips: Strips
    ) -> Tensor:
        dtype, local = sum_dtype(q.dtype), q.shape[2]
        scores = q.new_empty((*q.shape[:3], local * strips.group.size), dtype=dtype)
        rows = grouped(q.to(dtype), k.shape[1])
        for columns, (keys, *ids) in strips.blocks(k, *([] if segments is None else [segments])):
            block = grouped(rows @ keys.to(dtype).mT * strips.scale, q.shape[1])
            if segments is not None:
                block.masked_fill_((segments[:, :, None] != ids[0][:, None, :]).unsqueeze(1), -math.inf)
            scores[..., columns] = block
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        if strips.is_causal:
            mine = torch.arange(local, device=q.device) + strips.group.rank * local
            scores.masked_fill_(torch.arange(scores.shape[-1], device=q.device) > mine.unsqueeze(1), -math.inf)
        sees_nothing = scores.amax(-1, keepdim=True) == -math.inf
        weights = scores.softmax(-1).masked_fill_(sees_nothing, 0).to(q.dtype)
        kept = torch.rand_like(weights, dtype=torch.float32) >= strips.dropout if strips.dropout else None
        out = torch.zeros((*q.shape[:3], v.shape[-1]), dtype=dtype, device=q.device)
        dropped = _dropped(weights, kept, strips)
        for columns, (values,) in strips.blocks(v):
            out += grouped(grouped(dropped[..., columns].to(dtype), k.shape[1]) @ values.to(dtype), q.shape[1])
        ctx.strips = strips
        ctx.bias = None if mask is None or not mask.requires_grad else (mask.shape, mask.dtype)
        ctx.save_for_backward(q, k, v, weights, kept)
        return out.to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights, kept = ctx.saved_tensors
        strips: Strips = ctx.strips
        dtype = sum_dtype(q.dtype)
        rows, grad = grouped(q.to(dtype), k.shape[1]), grouped(grad_out.to(dtype), k.shape[1])
        dropped = _dropped(weights, kept, strips)

        dv = strips.own_sums(dropped, grad, v)
        of_weights = torch.empty_like(weights, dtype=dtype)
        for columns, (values,) in strips.blocks(v):
            of_weights[..., columns] = grouped(grad @ values.to(dtype).mT, q.shape[1])
        of_scores = _dropped(of_weights, kept, strips)
        of_scores = weights * (of_scores - (of_scores * weights).sum(-1, keepdim=True))
        of_bias = None if ctx.bias is None else of_scores.sum_to_size(ctx.bias[0]).to(ctx.bias[1])

        of_scores = of_scores * strips.scale
        dk = strips.own_sums(of_scores, rows, k)
        dq = torch.zeros_like(q, dtype=dtype)
        for columns, (keys,) in strips.blocks(k):
            dq += grouped(grouped(of_scores[..., columns], k.shape[1]) @ keys.to(dtype), q.shape[1])
        return dq.to(q.dtype), dk, dv, None, of_bias, None


def _dropped(weights: Tensor, kept: Tensor | None, strips: Strips) -> Tensor:
    return weights if kept is None else weights * kept / (1 - strips.dropout)
