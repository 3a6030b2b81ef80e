"""What ranks do with attention that goes over them, and what a plain one says. A module by itself: each of their processes imports it, and nothing of pytest."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from patrickstar.parallel import ContextParallel

WAYS = (("ring", "zigzag"), ("ring", "contiguous"), ("rsa", "contiguous"), ("ulysses", "contiguous"))
B, Z, L, A = 2, 4, 24, 4


@dataclass(frozen=True)
class Case:
    """A call of attention. `of_values`: the size of values, where it is another than that of keys."""

    method: str
    layout: str
    is_causal: bool = True
    key_heads: int = 4
    segments: bool = False
    dtype: torch.dtype = torch.float64
    mask: str = ""
    length: int = L
    of_values: int = A

    def __str__(self) -> str:
        return "-".join(str(value).removeprefix("torch.") for value in vars(self).values())


GRID = [
    Case(*way, is_causal, key_heads, segments)
    for way, is_causal, key_heads, segments in itertools.product(WAYS, (True, False), (4, 2, 1), (False, True))
]


@dataclass
class Whole:
    """Whole tensors of a case, the same on all ranks."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor
    segments: torch.Tensor | None
    mask: torch.Tensor | None


def whole_of(case: Case) -> Whole:
    """Random tensors; three documents, of which the last is padding in the first row."""
    torch.manual_seed(0)
    q, k = torch.randn(B, Z, case.length, A), torch.randn(B, case.key_heads, case.length, A)
    v, grad = torch.randn(B, case.key_heads, case.length, case.of_values), torch.randn(B, Z, case.length, case.of_values)
    q, k, v, grad = (each.double().to(case.dtype) for each in (q * 2, k, v, grad))
    # No border of a document is one of a rank's part, so that rows see nothing in some blocks.
    segments = torch.stack([torch.arange(case.length) * 3 // case.length, torch.arange(case.length) // 5])
    segments[0, -2:] = -1
    mask = None
    if case.mask == "boolean":
        mask = torch.rand(B, 1, case.length, case.length) > 0.3
        mask[:, :, 3] = False  # a row that sees nothing
    elif case.mask:
        mask = torch.randn(Z, case.length, case.length).to(case.dtype)
    return Whole(q, k, v, grad, segments if case.segments else None, mask)


def dense(case: Case, of: Whole, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Output and gradients of q, k, v (and an additive mask) of softmax over whole rows."""
    q, k, v = (each.detach().to(dtype).requires_grad_() for each in (of.q, of.k, of.v))
    bias = None
    times = Z // case.key_heads
    scores = q @ k.repeat_interleave(times, 1).mT / math.sqrt(A)
    seen = torch.ones(case.length, case.length, dtype=torch.bool)
    if case.is_causal:
        seen = seen.tril()
    if of.segments is not None:
        seen = seen & (of.segments[:, None, :, None] == of.segments[:, None, None, :])
    if of.mask is not None and of.mask.dtype == torch.bool:
        seen = seen & of.mask
    elif of.mask is not None:
        bias = of.mask.to(dtype).requires_grad_()
        scores = scores + bias
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    out = torch.nan_to_num(weights) @ v.repeat_interleave(times, 1)
    sources = [q, k, v] if bias is None else [q, k, v, bias]
    return [out.detach(), *torch.autograd.grad(out, sources, of.grad.to(dtype))]


def part(tensor: torch.Tensor, dim: int, layout: str, rank: int, size: int) -> torch.Tensor:
    """A rank's part, cut by another code than ours."""
    if layout == "contiguous":
        return tensor.tensor_split(size, dim)[rank]
    parts = tensor.tensor_split(2 * size, dim)
    return torch.cat([parts[rank], parts[2 * size - 1 - rank]], dim)


def over_ranks(cp: ContextParallel, case: Case, of: Whole) -> list[torch.Tensor]:
    """Output and gradients of this rank's part."""

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return part(tensor, 2, case.layout, cp.rank, cp.size).detach().contiguous().requires_grad_()

    q, k, v = (mine(each) for each in (of.q, of.k, of.v))
    segments = None if of.segments is None else part(of.segments, 1, case.layout, cp.rank, cp.size)
    mask = None if of.mask is None else part(of.mask, -2, case.layout, cp.rank, cp.size)
    sources = [q, k, v]
    if mask is not None and mask.dtype != torch.bool:
        sources.append(mask.requires_grad_())
    out = cp.attention(q, k, v, mask, is_causal=case.is_causal, enable_gqa=case.key_heads != Z, segments=segments)
    return [out.detach(), *torch.autograd.grad(out, sources, part(of.grad, 2, case.layout, cp.rank, cp.size))]


def contexts(size: int, ways: Any = WAYS) -> dict[tuple[str, str], ContextParallel]:
    """One for each way, over all ranks."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    return {way: ContextParallel(mesh, way[0], layout=way[1]) for way in ways}


def errors(rank: int, size: int, cases: list[Case]) -> dict[str, list[float]]:
    """The largest error of output and each gradient, relative to the largest element of the whole, by case."""
    made = contexts(size)
    found = {}
    for case in cases:
        of = whole_of(case)
        wanted = dense(case, of)
        got = over_ranks(made[case.method, case.layout], case, of)
        found[str(case)] = [
            float((mine.double() - part(whole, 2 - (whole.ndim == 3), case.layout, rank, size)).abs().max() / whole.abs().max())
            for mine, whole in zip(got, wanted, strict=True)
        ]
    return found


def errors_beside_flash(rank: int, size: int, cases: list[Case]) -> dict[str, list[float]]:
    """Errors as in `errors`, over those of plain attention on one rank in the same type."""
    ours = errors(rank, size, cases)
    for case in cases:
        of = whole_of(case)
        q, k, v = (each.detach().requires_grad_() for each in (of.q, of.k, of.v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal, enable_gqa=True)
        plain = [out.detach(), *torch.autograd.grad(out, [q, k, v], of.grad)]
        for number, (one, other) in enumerate(zip(plain, dense(case, of), strict=True)):
            ours[str(case)][number] /= float((one.double() - other).abs().max() / other.abs().max())
    return ours


