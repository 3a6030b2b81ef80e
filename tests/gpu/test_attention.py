"""Attention by blocks with the kernels of a GPU: the whole's output and gradients, with errors like those of torch's own attention there."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from patrickstar.parallel.kernels import attend, attend_backward

pytestmark = pytest.mark.device_only
EARLIER, OWN, HEADS = 96, 160, 4  # keys; there are as many queries as own ones
KINDS = [
    *itertools.product((torch.bfloat16, torch.float16), (64, 128), (4, 2), ("causal", "mask")),
    *itertools.product((torch.float32,), (64, 80), (4, 2), ("causal", "mask")),
    (torch.bfloat16, 12, 2, "causal"),  # what no kernel takes
]


def seen(way: str) -> Tensor:
    causal = torch.ones(OWN, EARLIER + OWN, device="cuda", dtype=torch.bool).tril(EARLIER)
    if way == "causal":
        return causal.expand(2, 1, OWN, EARLIER + OWN)
    drawn = torch.rand(2, 1, OWN, EARLIER + OWN, generator=torch.Generator().manual_seed(1)).cuda() < 0.4
    drawn[..., :7, :EARLIER] = False  # rows that see nothing of one block
    return drawn | torch.eye(OWN, EARLIER + OWN, device="cuda", dtype=torch.bool).roll(EARLIER, 1)


def by_blocks(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, way: str) -> list[Tensor]:
    """The output and gradients of q, k and v, of a block of earlier keys and one of a query's own."""
    parts, mask, scale = (slice(0, EARLIER), slice(EARLIER, None)), seen(way), q.shape[-1] ** -0.5
    asked = [
        {"mask": None if way == "causal" else mask[..., part], "is_causal": way == "causal" and bool(number)}
        for number, part in enumerate(parts)
    ]
    pieces = [attend(q, k[:, :, part], v[:, :, part], scale=scale, **how) for part, how in zip(parts, asked)]
    lse = torch.logaddexp(*(lse for _, lse in pieces))
    out = sum(out * (each - lse).exp().unsqueeze(-1) for out, each in pieces).to(q.dtype)
    grads = [
        attend_backward(grad, q, k[:, :, part], v[:, :, part], out, lse, scale=scale, **how)
        for part, how in zip(parts, asked)
    ]
    return [out, sum(dq.double() for dq, _, _ in grads), *(torch.cat(each, 2) for each in list(zip(*grads))[1:])]


def at_once(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, way: str) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=seen(way), enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize(("dtype", "width", "key_heads", "way"), KINDS)
def test_errors_of_blocks_are_within_three_times_those_of_torchs_attention(
    dtype: torch.dtype, width: int, key_heads: int, way: str
) -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, heads, n, width, generator=random).to("cuda", dtype)
        for heads, n in ((HEADS, OWN), (key_heads, EARLIER + OWN), (key_heads, EARLIER + OWN), (HEADS, OWN))
    )
    exact = at_once(*(each.double() for each in (q, k, v, grad)), way)
    for name, ours, torchs, wanted in zip(
        ("out", "q", "k", "v"), by_blocks(q, k, v, grad, way), at_once(q, k, v, grad, way), exact
    ):
        errors = [float((each.double() - wanted).abs().max()) for each in (ours, torchs)]
        assert errors[0] <= 3 * max(errors[1], torch.finfo(dtype).eps * float(wanted.abs().max())), (name, errors)
