"""Attention of a block of queries to a block of keys, which may be a part of all: the output with the log-sum-exp of its scores, and gradients.

    q, out [B, Z, n, A], k [B, Zk, m, A], v [B, Zk, m, Av], lse [B, Z, n] in fp32 (fp64 in fp64); mask [B, 1, n, m], true where a query sees a key

Gradients are exact parts of the whole's where `out` and `lse` are the whole's: P = exp(S - lse), and rowsum(dO * O) stands for rowsum(dP * P)
(arXiv 2205.14135). They are in the type of q. Kernels of CUDA have run on an H100.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ops = torch.ops.aten


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over blocks are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as `F.linear` takes them: of autocast's type where that is on."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of a block. A row that sees nothing has output 0 and log-sum-exp -inf."""
    match _kernel(q, v, mask):
        case "cpu":
            out, lse = _ops._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, is_causal, attn_mask=_additive(mask, q.dtype), scale=scale
            )
        case "flash":
            out, lse = _ops._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[:2]
        case "efficient":
            k, v = (_repeated(each, q.shape[1]) for each in (k, v))
            bias = _expanded(mask, q, k)
            given = (q, k, v, bias, True, 0.0, is_causal)
            out, lse, *_ = _ops._scaled_dot_product_efficient_attention(*given, scale=scale)
            lse = lse[:, :, : q.shape[2]]  # padded by the kernel
        case _:
            scores = _scores(q, k, mask, is_causal, scale)
            lse = scores.logsumexp(-1)
            weights = (scores - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()
            out = grouped(grouped(weights, k.shape[1]) @ v.to(weights.dtype), q.shape[1]).to(q.dtype)
    if mask is not None:
        # The kernel for CPUs says 0 there, with which a row that sees nothing would weigh as much as a key with score 0.
        lse = lse.masked_fill(~mask.any(-1), -math.inf)
    return out, lse.to(sum_dtype(q.dtype))


def attend_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's part of the gradients of q, k and v, from output and log-sum-exp over all keys."""
    heads = k.shape[1]
    match _kernel(q, v, mask):
        case "cpu":
            dq, dk, dv = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
                *(grad_out, q, k, v, out, lse, 0.0, is_causal), attn_mask=_additive(mask, q.dtype), scale=scale
            )
        case "flash":
            none = torch.empty(0, dtype=torch.int64, device=q.device)  # of dropout; rows are whole sequences
            dq, dk, dv = _ops._scaled_dot_product_flash_attention_backward(
                *(grad_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, none, none),
                scale=scale,
            )
        case "efficient":
            k, v = (_repeated(each, q.shape[1]) for each in (k, v))
            bias, none = _expanded(mask, q, k), torch.empty(0, dtype=torch.int64, device=q.device)
            padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
            dq, *of_copies, _ = _ops._scaled_dot_product_efficient_attention_backward(
                *(grad_out, q, k, v, bias, out, padded, none, none, 0.0, (True, True, True, False), is_causal),
                scale=scale,
            )
            dk, dv = (each.unflatten(1, (heads, -1)).sum(2) for each in of_copies)
        case _:
            scores = _scores(q, k, mask, is_causal, scale)
            grad, queries, keys, values = (each.to(scores.dtype) for each in (grad_out, q, k, v))
            weights = grouped((scores - lse.unsqueeze(-1)).exp(), heads)
            rows = grouped(grad, heads)
            delta = grouped((grad * out).sum(-1, keepdim=True), heads)
            of_scores = weights * (rows @ values.mT - delta) * scale
            dq = grouped(of_scores @ keys, q.shape[1])
            dk, dv = of_scores.mT @ grouped(queries, heads), weights.mT @ rows
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _kernel(q: Tensor, v: Tensor, mask: Tensor | None) -> str:
    if q.shape[-1] != v.shape[-1]:
        return "plain"
    if q.device.type == "cpu":
        return "cpu"
    if q.device.type != "cuda" or q.dtype == torch.float64 or q.shape[-1] % 8:
        return "plain"
    is_short = q.dtype in {torch.float16, torch.bfloat16} and q.shape[-1] <= 256
    return "flash" if is_short and mask is None else "efficient"


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if mask is None else torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def _expanded(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A bias for each head, whose rows begin where the kernel can read sixteen bytes."""
    if mask is None:
        return None
    rows = torch.nn.functional.pad(mask, (0, -k.shape[2] % 16))
    bias = _additive(rows, q.dtype)
    assert bias is not None
    return bias[..., : k.shape[2]].expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    dtype = sum_dtype(q.dtype)
    scores = grouped(grouped(q.to(dtype), k.shape[1]) @ k.to(dtype).mT * scale, q.shape[1])
    if is_causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def grouped(rows: Tensor, heads: int) -> Tensor:
    """Rows of heads [B, Z, n, x] as [B, heads, Z/heads * n, x]: those of query heads beside the key head that they share, and back."""
    return rows.reshape(rows.shape[0], heads, -1, rows.shape[-1])


def _repeated(rows: Tensor, heads: int) -> Tensor:
    return rows.repeat_interleave(heads // rows.shape[1], 1)
