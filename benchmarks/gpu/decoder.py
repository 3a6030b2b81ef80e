"""A decoder as current ones are (RMS norms, rotary positions, grouped queries, SwiGLU), in plain PyTorch: benchmarks need no other package.

Shape legend: B sequences, S tokens, A heads, G heads of keys and values, D elements a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Decoder", "Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's numbers. `recompute`: whether each block's forward is run again in backward."""

    layers: int
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    inner: int = 14336
    vocab: int = 32768
    recompute: bool = True
    dropout: float = 0.0

    def numel(self) -> int:
        """Parameters."""
        kv = self.width * self.kv_heads // self.heads
        block = 2 * self.width**2 + 2 * self.width * kv + 3 * self.width * self.inner + 2 * self.width
        return self.layers * block + 2 * self.vocab * self.width + self.width


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Queries or keys [B, A, S, D] turned by their positions' angles [S, D/2], in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, kv = shape.width, shape.width * shape.kv_heads // shape.heads
        self.shape = shape
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x), angles)
        h = self.mlp_norm(x)
        return x + F.dropout(self.down(F.silu(self.gate(h)) * self.up(h)), self.shape.dropout, self.training)

    def attend(self, h: Tensor, angles: Tensor) -> Tensor:
        """Of every token to those before it."""
        shape, (batch, tokens, _) = self.shape, h.shape
        q = self.q(h).view(batch, tokens, shape.heads, -1).transpose(1, 2)  # [B, A, S, D]
        k, v = (part(h).view(batch, tokens, shape.kv_heads, -1).transpose(1, 2) for part in (self.k, self.v))
        k = rotated(k, angles).repeat_interleave(shape.heads // shape.kv_heads, dim=1)  # [B, G, S, D] -> [B, A, S, D]
        v = v.repeat_interleave(shape.heads // shape.kv_heads, dim=1)
        mixed = F.scaled_dot_product_attention(rotated(q, angles), k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class Decoder(nn.Module):
    """From tokens and labels [B, S] to the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        half = self.shape.width // self.shape.heads // 2
        rates = 10000.0 ** (-torch.arange(half, device=tokens.device, dtype=torch.float32) / half)
        angles = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32).outer(rates)  # [S, D/2]
        recompute = self.shape.recompute and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, angles, use_reentrant=False) if recompute else block(x, angles)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())
