"""Parts of random programs: blocks of models, inputs, hooks, what is around a loop, second optimizers, budgets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import patrickstar

W = 16
"""Elements of a token, of which there are three in each row of an input."""

# models


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.3)


def _with(module: nn.Module, **parts: nn.Parameter) -> nn.Module:
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def _codes(x: Tensor, count: int) -> Tensor:
    return (x.detach().float().sum(-1).abs() * 8).nan_to_num(0, 0, 0).long() % count


def _linear(_: nn.Module) -> dict[str, Any]:
    return {"a": nn.Linear(W, W)}


def _weight(_: nn.Module) -> dict[str, Any]:
    return {"w": _parameter(W, W)}


def _changing(change: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
    """A use of a weight that is changed first, without a graph."""

    def use(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            change(m)
        return F.linear(x, m.w)

    return use


def _nearest(m: Any, x: Tensor) -> Tensor:
    """A codebook, whose nearest rows are drawn to what is looked up."""
    found = torch.cdist(x.detach(), m.w[None]).argmin(-1)
    with torch.no_grad():
        if m.training:
            m.w.index_add_(0, found.flatten(), x.detach().reshape(-1, W), alpha=0.01)
    return x + (m.w[found] - x).detach() + m.w.square().mean()


def _jagged(m: Any, x: Tensor) -> Tensor:
    rows = x.reshape(-1, W)
    offsets = torch.tensor([0, 1, len(rows)])
    return m.a(torch.nested.nested_tensor_from_jagged(rows, offsets)).values().reshape(x.shape)


class Scale(torch.autograd.Function):
    """Saves a weight, and reads it in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2)


def _complex(m: Any, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x.float()) * torch.view_as_complex(m.w).conj(), n=W)


BLOCKS: dict[str, tuple[Callable[[nn.Linear], dict[str, Any]], Callable[[Any, Tensor], Tensor]]] = {
    "linear": (_linear, lambda m, x: m.a(x)),
    "embedding": (lambda _: {"a": nn.Embedding(11, W)}, lambda m, x: x + m.a(_codes(x, 11))),
    "embedding, max_norm": (lambda _: {"a": nn.Embedding(11, W, max_norm=1.0)}, lambda m, x: x + m.a(_codes(x, 11))),
    "embedding bag": (lambda _: {"a": nn.EmbeddingBag(11, W)}, lambda m, x: x + m.a(_codes(x, 11))[:, None]),
    "layer norm": (lambda _: {"a": nn.LayerNorm(W)}, lambda m, x: m.a(x)),
    "rms norm": (lambda _: {"a": nn.RMSNorm(W)}, lambda m, x: m.a(x)),
    "batch norm": (lambda _: {"a": nn.BatchNorm1d(W)}, lambda m, x: m.a(x.mT).mT),
    "conv": (lambda _: {"a": nn.Conv1d(W, W, 3, padding=1)}, lambda m, x: m.a(x.mT).mT),
    "lstm": (lambda _: {"a": nn.LSTM(W, W, batch_first=True)}, lambda m, x: m.a(x)[0]),
    "gru": (lambda _: {"a": nn.GRU(W, W, bidirectional=True)}, lambda m, x: m.a(x)[0][..., W // 2 : -W // 2]),
    "attention": (lambda _: {"a": nn.MultiheadAttention(W, 2)}, lambda m, x: m.a(x, x, x, need_weights=False)[0]),
    "encoder": (lambda _: {"a": nn.TransformerEncoderLayer(W, 2, W, batch_first=True)}, lambda m, x: m.a(x)),
    "tied": (lambda s: {"a": _with(nn.Linear(W, W), weight=s.weight)}, lambda m, x: m.a(x)),
    "tied, transposed": (lambda s: {"w": s.weight}, lambda m, x: x @ m.w),
    "shared": (lambda s: {"a": s}, lambda m, x: m.a(m.a(x).tanh())),
    "borrowed": (lambda _: {}, lambda m, x: F.linear(x, m.of[0].weight.t(), m.of[0].bias)),
    "weight_norm": (lambda _: {"a": nn.utils.weight_norm(nn.Linear(W, W))}, lambda m, x: m.a(x)),
    "spectral_norm": (lambda _: {"a": nn.utils.spectral_norm(nn.Linear(W, W))}, lambda m, x: m.a(x)),
    "weight_norm, new": (lambda _: {"a": parametrizations.weight_norm(nn.Linear(W, W))}, lambda m, x: m.a(x)),
    "spectral_norm, new": (lambda _: {"a": parametrizations.spectral_norm(nn.Linear(W, W))}, lambda m, x: m.a(x)),
    "orthogonal": (lambda _: {"a": parametrizations.orthogonal(nn.Linear(W, W))}, lambda m, x: m.a(x)),
    "prune": (lambda _: {"a": prune.l1_unstructured(nn.Linear(W, W), "weight", 0.3)}, lambda m, x: m.a(x)),
    "view": (_weight, lambda m, x: F.linear(x, m.w.view(-1).view(W, W))),
    "t": (_weight, lambda m, x: x @ m.w.t().contiguous().t().T),
    "expand": (
        lambda _: {"w": _parameter(1, W)},
        lambda m, x: torch.baddbmm(x, x, m.w.expand(W, W)[None].expand(len(x), W, W)),
    ),
    "complex": (lambda _: {"w": _parameter(W // 2 + 1, 2)}, _complex),
    "bits": (_weight, lambda m, x: x * (m.w.view(torch.int32)[0] % 5).float() + m.w.detach().view(torch.uint8)[0, :W]),
    "split": (_weight, lambda m, x: torch.cat([x[..., :8] @ p for p in m.w[:8].split(8, dim=1)], -1)),
    "chunk": (_weight, lambda m, x: sum(F.linear(x[..., :8], p) for p in m.w.chunk(2, dim=1))),
    "slices": (_weight, lambda m, x: x + x[..., ::2] @ m.w[1::2] + m.w[3, 2]),
    "unbind": (_weight, lambda m, x: torch.stack([x @ row for row in m.w.unbind()], -1)),
    "diagonal": (_weight, lambda m, x: x * m.w.diagonal() + torch.einsum("bti,ij->btj", x, m.w.tril())),
    "data": (_weight, lambda m, x: x @ m.w.data + x * m.w[0]),
    "detach": (_weight, lambda m, x: x @ m.w.detach().t() - x * m.w[:, 1]),
    "numbers": (lambda _: {"w": _parameter()}, lambda m, x: x * float(m.w) + m.w.item() * m.w),
    "numpy": (_weight, lambda m, x: x + torch.from_numpy(m.w.detach().numpy()[0].copy()) * m.w[1]),
    "stacked": (lambda s: _linear(s) | _weight(s), lambda m, x: torch.stack([m.a.weight, m.w]).prod(0)[0] + m.a(x)),
    "where": (_weight, lambda m, x: x @ torch.where(m.w > 0, m.w, 0.1 * m.w).masked_fill(m.w > 0.5, 0.5)),
    "out": (_weight, lambda m, x: x + m.w[0] + torch.no_grad()(partial(torch.mm, out=torch.empty(W, W)))(m.w, m.w)[0]),
    "function": (_weight, lambda m, x: Scale.apply(x, m.w)),
    "branch": (lambda s: _linear(s) | _weight(s), lambda m, x: m.a(x) if x.detach().sum() > 0 else x @ m.w),
    "dropout": (_linear, lambda m, x: m.a(F.dropout(x, 0.3, m.training))),
    "penalty": (_linear, lambda m, x: x + _penalty(m, x)),
    "vmap inside": (_weight, lambda m, x: torch.vmap(lambda row: F.linear(row, m.w))(x)),
    "jagged inside": (_linear, _jagged),
    "codebook": (_weight, _nearest),
    "clamped": (_weight, _changing(lambda m: m.w.clamp_(-0.4, 0.4))),
    "decayed": (_weight, _changing(lambda m: m.w.data.mul_(0.9))),
    "rows changed": (_weight, _changing(lambda m: m.w[2:4].add_(0.01))),
    "copied from": (_weight, _changing(lambda m: m.w.copy_(m.of[0].weight))),
}


def _penalty(m: Any, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return m.a(x)
    point = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(m.a(point).tanh().sum(), point, create_graph=True)
    return m.a(x) * slope.square().mean()


AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "tanh": torch.tanh,
    "relu_": lambda x: F.relu(x, inplace=True),
    "tanh_": lambda x: (x * 1.5).tanh_(),
    "add_": lambda x: x.add_(0.125),
    "row": lambda x: _set_row(x.clone()),
    "normalised": lambda x: F.normalize(x, dim=-1),
}


def _set_row(x: Tensor) -> Tensor:
    x[0] = 0.5
    return x


class Block(nn.Module):
    """One block of a model; `of`: its first layer, which is no child of this one."""

    def __init__(self, kind: str, after: str, recomputed: bool | None, stem: nn.Linear) -> None:
        super().__init__()
        make, self.use = BLOCKS[kind]
        self.after, self.recomputed, self.of = AFTER[after], recomputed, [stem]
        for name, part in make(stem).items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputed is None or not torch.is_grad_enabled():
            return self.inside(x)
        return checkpoint(self.inside, x, use_reentrant=self.recomputed)

    def inside(self, x: Tensor) -> Tensor:
        return self.after(self.use(self, x))


class Net(nn.Module):
    """A first layer, and blocks."""

    def __init__(self, blocks: list[tuple[str, str, bool | None]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(W, W)
        self.blocks = nn.ModuleList(Block(*given, self.stem) for given in blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


# what is around them


class Default(Tensor):
    """An input of a class of its own, which does what torch does."""


class Silent(Tensor):
    """An input whose operations ask no other class."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "one row": lambda x: x[:1],
    "transposed": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:1].expand(3, -1, -1),
    "of a class": lambda x: x.as_subclass(Default),
    "wants a gradient": lambda x: x.requires_grad_(),
    "no leaf": lambda x: x.requires_grad_() * 1,
    "autocast": lambda x: x,
    "autocast of bf16": lambda x: x.bfloat16(),
    "autocast of fp16": lambda x: x.half(),
    "asks no other": lambda x: x.as_subclass(Silent),
    "jagged": lambda x: torch.nested.nested_tensor([x[0], x[1, :1]], layout=torch.jagged),
}
STRANGE = ("asks no other", "jagged")


def _doubled(value: Any) -> Any:
    return (
        tuple(map(_doubled, value)) if isinstance(value, tuple) else value * 2 if isinstance(value, Tensor) else value
    )


def hooks(note: Callable[..., None]) -> dict[str, Callable[[nn.Module], Any]]:
    """Each kind of hook: what registers it."""

    def doubling(*given: Any) -> Any:
        note(*given)
        return _doubled(given[-1])

    return {
        "forward": lambda m: m.register_forward_hook(note),
        "forward, doubling": lambda m: m.register_forward_hook(doubling),
        "before forward": lambda m: m.register_forward_pre_hook(note),
        "before forward, doubling": lambda m: m.register_forward_pre_hook(doubling),
        "with keywords": lambda m: m.register_forward_hook(note, with_kwargs=True, always_call=True),
        "backward": lambda m: m.register_full_backward_hook(note),
        "backward, doubling": lambda m: m.register_full_backward_hook(lambda *given: doubling(*given[:2])),
        "before backward": lambda m: m.register_full_backward_pre_hook(note),
        "of a weight": lambda m: [p.register_hook(note) for p in list(m.parameters())[:1]],
        "of a weight, doubling": lambda m: [p.register_hook(doubling) for p in list(m.parameters())[:1]],
        "once it is there": lambda m: [
            p.register_post_accumulate_grad_hook(lambda p: note(p.grad)) for p in list(m.parameters())[:1]
        ],
        "of a result": lambda m: m.register_forward_hook(
            lambda *given: given[-1].register_hook(doubling) and None if given[-1].requires_grad else None
        ),
    }


AROUND: dict[str, Callable[[], Any]] = {
    "": nullcontext,
    "anomaly": partial(torch.autograd.detect_anomaly, check_nan=False),
    "saved": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
    "saved copies": lambda: saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t),
    "on cpu": save_on_cpu,
    "flops": partial(FlopCounterMode, display=False),
}
SECOND: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "fused": lambda rest: torch.optim.AdamW(rest, lr=1e-2, fused=True),
    "foreach": lambda rest: torch.optim.Adam(rest, lr=1e-2, foreach=True),
    "momentum": lambda rest: torch.optim.SGD(rest, lr=1e-2, momentum=0.9, nesterov=True),
    "ours": lambda rest: patrickstar.AdamW(rest, lr=1e-2),
}
BUDGETS: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "roomy": lambda _, __: {"device": "cpu"},
    "emulated": lambda _, nbytes: {"device": "emulated", "device_memory": nbytes},
    "disk": lambda disk, nbytes: {"device": "cpu", "host_memory": nbytes, "disk": disk},
}


HOOKS = list(hooks(lambda *_: None))
