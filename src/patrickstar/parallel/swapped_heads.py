"""Attention with whole sequences for some heads (DeepSpeed Ulysses, arXiv 2309.14509): an all-to-all from tokens to heads, and one back.

Each rank has c = L/N tokens of all heads, [B, Z, c, A], or Z/N heads of all tokens, [B, Z/N, L, A]. Where there are fewer key heads than ranks, each
is copied to the ranks whose query heads share it; their gradients are added up by autograd.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from patrickstar.parallel.group import MeshGroup
from patrickstar.parallel.layouts import TokenLayout
from patrickstar.parallel.ring import Ring


@dataclass(frozen=True, slots=True)
class SwappedHeads:
    """Attention whose ranks swap tokens for heads. Tokens are in contiguous parts over ranks."""

    group: MeshGroup
    is_causal: bool
    scale: float
    dropout: float = 0.0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Tensor | None) -> Tensor:
        """The output for this rank's tokens."""
        copies = max(1, self.group.size // key.shape[1])
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        q, k, v = (_Swap.apply(each, self.group, True) for each in (query, key, value))
        if segments is not None:
            segments = self.group.gather(segments).movedim(0, 1).flatten(1)
        return _Swap.apply(self.whole(q, k, v, segments), self.group, False)

    def whole(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Tensor | None, mask: Tensor | None = None
    ) -> Tensor:
        """The output of attention to all tokens, which this rank has."""
        if segments is not None and mask is None and not self.dropout:  # a ring of one keeps no mask for backward
            alone = Ring(MeshGroup(), TokenLayout("contiguous", 1), self.is_causal, self.scale)
            return alone(query, key, value, segments)
        if segments is not None or (self.is_causal and mask is not None):
            seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
            if segments is not None:
                seen = (segments[:, :, None] == segments[:, None, :]).unsqueeze(1)
            seen = seen.tril() if self.is_causal else seen
            if mask is not None:
                seen = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
            mask = seen
        return F.scaled_dot_product_attention(
            *(query, key, value, mask, self.dropout, self.is_causal and mask is None),
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


class _Swap(torch.autograd.Function):
    """Brings what ranks have as [B, Z, c, A] to [B, Z/N, L, A], or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: MeshGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        cut, joined = (1, 2) if to_heads else (2, 1)
        pieces = group.exchange(x.unflatten(cut, (group.size, -1)).movedim(cut, 0).contiguous())
        return pieces.movedim(0, joined).flatten(joined, joined + 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Swap.apply(grad, ctx.group, not ctx.to_heads), None, None
