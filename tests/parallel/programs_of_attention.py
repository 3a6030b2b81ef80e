"""What ranks do with attention that goes over them, and what a plain one says. Their processes import it: nothing of pytest is in it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from patrickstar.parallel import ContextParallel, traffic

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
    v, grad = (
        torch.randn(B, case.key_heads, case.length, case.of_values),
        torch.randn(B, Z, case.length, case.of_values),
    )
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
    if case.key_heads == 2:  # rows that are not dense
        q, k, v = (each.detach().mT.contiguous().mT.requires_grad_() for each in (q, k, v))
    segments = None if of.segments is None else part(of.segments, 1, case.layout, cp.rank, cp.size)
    mask = None if of.mask is None else part(of.mask, -2, case.layout, cp.rank, cp.size)
    sources = [q, k, v]
    if mask is not None and mask.dtype != torch.bool:
        sources.append(mask.requires_grad_())
    out = cp.attention(q, k, v, mask, is_causal=case.is_causal, enable_gqa=case.key_heads != Z, segments=segments)
    return [out.detach(), *torch.autograd.grad(out, sources, part(of.grad, 2, case.layout, cp.rank, cp.size))]


def contexts(size: int, ways: Any = WAYS) -> dict[tuple[str, str], ContextParallel]:
    """One for each way, over so many ranks; the others do the same among them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("dp", "cp"))["cp"]
    return {way: ContextParallel(mesh, way[0], layout=way[1]) for way in ways}


def errors(rank: int, size: int, cases: list[Case]) -> dict[str, list[float]]:
    """The largest error of output and each gradient, relative to the largest element of the whole, by case."""
    made = contexts(size)
    found = {}
    for case in cases:
        of = whole_of(case)
        wanted = dense(case, of)
        cp = made[case.method, case.layout]
        got = over_ranks(cp, case, of)
        found[str(case)] = [
            float(
                (mine.double() - part(whole, 2 - (whole.ndim == 3), case.layout, cp.rank, size)).abs().max()
                / whole.abs().max()
            )
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


def bytes_and_storages(rank: int, size: int, cases: list[Case]) -> dict[str, tuple[int, int, int, int, int]]:
    """Bytes sent in forward and in backward, bytes kept for backward, the most elements of any tensor, and all that were sent, by case."""
    made = contexts(size)
    found = {}
    for case in cases:
        of, cp = whole_of(case), made[case.method, case.layout]
        q, k, v = (part(each, 2, case.layout, rank, size).contiguous().requires_grad_() for each in (of.q, of.k, of.v))
        segments = None if of.segments is None else part(of.segments, 1, case.layout, rank, size)
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with Largest() as largest:
            with traffic() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                out = cp.attention(q, k, v, is_causal=case.is_causal, enable_gqa=True, segments=segments)
            with traffic() as backward:
                out.backward(part(of.grad, 2, case.layout, rank, size))
        found[str(case)] = (
            forward.sent["cp"],
            backward.sent["cp"],
            sum(kept.values()),
            largest.numel,
            len(forward.sent),
        )
    return found


class Largest(TorchDispatchMode):
    """Sees the largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, list | tuple) else [result]:
            if isinstance(one, torch.Tensor):
                self.numel = max(self.numel, one.numel())
        return result


def as_shapes(rank: int, size: int, cases: list[Case]) -> list[bool]:
    """Whether attention of fake tensors says nothing to other ranks, and gives what real ones give but for the values."""
    made = contexts(size)
    found = []
    for case in cases:
        of = whole_of(case)
        real = over_ranks(made[case.method, case.layout], case, of)
        with traffic() as seen, FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = {name: None if value is None else mode.from_tensor(value) for name, value in vars(of).items()}
            fake = over_ranks(made[case.method, case.layout], case, Whole(**fakes))
        alike = [(one.shape, one.dtype) == (other.shape, other.dtype) for one, other in zip(real, fake, strict=True)]
        found.append(all(alike) and seen.sent == {})
    return found


def with_dropout(rank: int, size: int) -> tuple[float, float]:
    """The error of the slope of exact strips with dropout along a direction, and the mean of attention to ones."""
    cp = contexts(size, [("rsa", "contiguous")])["rsa", "contiguous"]
    torch.manual_seed(rank)
    sources = [torch.randn(2, 4, 16, A, dtype=torch.float64) for _ in range(3)]
    along = [torch.randn_like(each) for each in sources]

    def value(step: float, *, slope: bool = False) -> torch.Tensor:
        q, k, v = ((each + step * way).requires_grad_() for each, way in zip(sources, along, strict=True))
        torch.manual_seed(5 + rank)
        total = cp.attention(q, k, v, dropout_p=0.3, is_causal=True).square().sum()
        if slope:
            grads = torch.autograd.grad(total, [q, k, v])
            total = sum(((grad * way).sum() for grad, way in zip(grads, along, strict=True)), torch.zeros(()))
        total = total.detach().clone()
        dist.all_reduce(total)
        return total

    step = 1e-5
    wanted = (value(step) - value(-step)) / (2 * step)
    one = torch.ones(8, 4, 64, A)
    mean = cp.attention(torch.zeros_like(one), torch.zeros_like(one), one, dropout_p=0.3).mean()
    return float(abs(value(0, slope=True) / wanted - 1)), float(mean)


def alone(rank: int) -> list[bool]:
    """Whether a group of one has the bits of plain attention and cross-entropy, in each method."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))["cp"]
    same = []
    for method in ("ring", "rsa", "ulysses"):
        cp = ContextParallel(mesh, method)
        q, k, v = (torch.randn(2, heads, 8, A, requires_grad=True) for heads in (4, 2, 2))
        logits, labels = torch.randn(2, 8, 50, requires_grad=True), torch.randint(50, (2, 8))
        labels[0, :3] = -100
        pairs = [
            (
                cp.attention(q, k, v, is_causal=True, enable_gqa=True),
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            ),
            (cp.cross_entropy(logits, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten())),
        ]
        for ours, plain in pairs:
            sources = [q, k, v] if ours.ndim else [logits]
            grads = [torch.autograd.grad(each.square().sum(), sources) for each in (ours, plain)]
            same.append(torch.equal(ours, plain) and all(map(torch.equal, *grads)))
        none = cp.cross_entropy(logits, torch.full_like(labels, -100))
        same.append(float(none) == 0 and not torch.autograd.grad(none, logits)[0].any())
        same.append(torch.equal(cp.unshard(cp.shard(q, 2), 2), q) and cp.multiple == 1)
        same.append(cp.shard({"labels": labels}) == {"labels": labels})
    return same
