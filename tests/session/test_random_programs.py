"""Random programs: models, hooks, inputs and loops that nobody has thought of, beside plain PyTorch.

A program is data: blocks of a model, hooks, budgets, and statements of a loop. It is run in plain PyTorch, then under a session. After each statement
what it has shown has the same bits, or the session has refused it, in which case nothing has differed before.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import patrickstar
from patrickstar.torch_private import top_saved_tensors_hooks
from tests.parity.compare import describe, same_bits
from tests.session.builders import adamw, held_states, options, states

W = 16
UNREADABLE = ("placeholder", "Storage that is invalid", "refers to a single memory location")
"""Texts of torch's errors where a placeholder is read or written."""

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
    "encoder": (
        lambda _: {"a": nn.TransformerEncoderLayer(W, 2, W, batch_first=True)},
        lambda m, x: m.a(x),
    ),
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
    "expand": (lambda _: {"w": _parameter(1, W)}, lambda m, x: torch.baddbmm(x, x, m.w.expand(W, W)[None].expand(len(x), W, W))),
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
    return tuple(map(_doubled, value)) if isinstance(value, tuple) else value * 2 if isinstance(value, Tensor) else value


def _hooks(note: Callable[..., None]) -> dict[str, Callable[[nn.Module], Any]]:
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
        "of a weight": lambda m: next(m.parameters()).register_hook(note),
        "of a weight, doubling": lambda m: next(m.parameters()).register_hook(doubling),
        "once it is there": lambda m: next(m.parameters()).register_post_accumulate_grad_hook(lambda p: note(p.grad)),
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

# loops


class World:
    """A model, plain or managed, and what a loop has."""

    def __init__(self, program: Program, manage: Callable[[nn.Module, Any], Any] | None = None) -> None:
        self.seen: list[Any] = []
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.held: list[Tensor] = []
        self.number = 0
        self.model = Net(program.blocks)
        self.parameters = list(self.model.parameters())
        split = max(1, len(self.parameters) - program.rest)
        self.optimizer: Any = adamw(nn.ParameterList(self.parameters[:split]))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.7)
        self.session = None if manage is None else manage(self.model, self.optimizer)
        if self.session is not None:
            self.optimizer = self.session.optimizer
        rest = self.parameters[split:]
        self.second = SECOND[program.second](rest) if rest else None
        for kind, place in program.hooks:
            _hooks(lambda *given: self.seen.append(shown(given)))[kind](self.modules[place % len(self.modules)])

    @property
    def modules(self) -> list[nn.Module]:
        return [self.model, self.model.stem, *self.model.blocks]

    def weight(self, n: int) -> Any:
        return self.parameters[n % len(self.parameters)]

    def input(self, kind: str) -> Tensor:
        x = torch.randn(2, 3, W, generator=torch.Generator().manual_seed(self.number))
        return INPUTS[kind](x)

    def loss(self, kind: str, call: Callable[..., Tensor] | None = None) -> tuple[Tensor, Tensor]:
        x = self.input(kind)
        with torch.autocast("cpu", torch.bfloat16) if kind.startswith("autocast") else nullcontext():
            out = (call or self.model)(x)
        return (out.values() if out.is_nested else out).float().square().mean(), x


def shown(value: Any) -> list[Any]:
    """Copies of the tensors in something, and texts of what else is there."""
    return [
        "transformed"
        if isinstance(leaf, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(leaf)
        else leaf.detach().clone().as_subclass(Tensor)
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        if isinstance(leaf, nn.Module)
        else repr(leaf)
        for leaf in tree_leaves(value)
    ]


def _forward(w: World, n: int, call: Callable[..., Tensor] | None = None) -> Any:
    kinds = [kind for kind in INPUTS if kind not in STRANGE]
    w.waiting.append(w.loss(kinds[n % len(kinds)] if n % 3 else "plain", call))
    return w.waiting[-1][0]


def _backward(w: World, n: int) -> Any:
    if not w.waiting:
        return None
    keeps = n % 5 == 0
    loss, x = w.waiting[0] if keeps else w.waiting.pop(0)
    loss.backward(retain_graph=keeps)
    return x.grad if x.is_leaf else None


def _step(w: World, n: int) -> None:
    if n % 7 == 0:
        w.waiting.clear()
    w.optimizer.step()
    if w.second is not None:
        w.second.step()


def _zero(w: World, n: int) -> None:
    [
        lambda: w.optimizer.zero_grad(),
        lambda: w.model.zero_grad(set_to_none=False),
        lambda: w.optimizer.zero_grad(set_to_none=False),
        lambda: w.model.zero_grad(),
        lambda: [setattr(p, "grad", None) for p in w.parameters],
    ][n % 5]()


def _train(w: World, n: int) -> Any:
    w.waiting.clear()
    found = [_forward(w, n).detach().clone(), _backward(w, 1)]
    _step(w, n)
    w.model.zero_grad()
    return found


def _evaluate(w: World, n: int) -> Any:
    w.model.train(n % 3 == 0)
    try:
        with torch.inference_mode() if n % 2 else torch.no_grad():
            return w.loss("autocast" if n % 5 == 4 else "plain")[0]
    finally:
        w.model.train()


def _edit_gradient(w: World, n: int) -> Any:
    p = w.weight(n)
    match n % 4:
        case 0 if p.grad is not None:
            p.grad.mul_(0.5)
        case 1 if p.grad is not None:
            p.grad = p.grad.clone() * 2
        case 2:
            p.grad = torch.full_like(p, 0.01)
        case 3:
            p.grad = None
    return p.grad


def _edit_weight(w: World, n: int) -> Any:
    p = w.weight(n)
    w.held = []  # of what is assigned, views of before are no aliases
    with torch.no_grad():
        [
            lambda: setattr(p, "data", p.data * 0.5),
            lambda: p.mul_(0.9),
            lambda: p.data.add_(0.01),
            lambda: p.copy_(torch.full_like(p, 0.1)),
            lambda: nn.init.uniform_(p, -0.2, 0.2),
            lambda: p.view(-1)[:1].fill_(0.3),
            lambda: torch._foreach_mul_([q.detach() for q in w.parameters], 0.95),
            lambda: nn.utils.vector_to_parameters(
                nn.utils.parameters_to_vector(w.parameters).detach() * 0.9, w.parameters
            ),
            lambda: setattr(p, "data", torch.full_like(p.data, 0.05)),
        ][n % 9]()
    return p


def _double(w: World, n: int) -> Any:
    """A gradient that is differentiated."""
    loss, _ = w.loss("plain")
    if n % 3 == 0:
        loss.backward(create_graph=True)
        return [p.grad for p in w.parameters]
    found = torch.autograd.grad(loss, w.parameters, create_graph=True, allow_unused=True, materialize_grads=n % 3 == 1)
    sum((g.square().sum() for g in found if g is not None), loss * 0).backward()
    return found


def _freeze(w: World, n: int) -> None:
    w.waiting.clear()
    w.weight(n).requires_grad_(not w.weight(n).requires_grad)


def _hold(w: World, n: int) -> Any:
    p = w.weight(n)
    views = (lambda: p.detach(), lambda: p.data, lambda: p.detach().view(-1), lambda: p.detach()[:1], lambda: p.grad)
    held = views[n % 5]()
    w.held = [*w.held, held] if held is not None and n % 5 < 4 else w.held
    return w.held


def _state(w: World, n: int) -> Any:
    state = w.optimizer.state.get(w.parameters[0], {})
    if "exp_avg" in state and n % 2:
        state["exp_avg"].mul_(0.5)
    if n % 3 == 0:
        w.optimizer.load_state_dict(copy.deepcopy(w.optimizer.state_dict()))
    return [state.get("exp_avg"), float(state.get("step", 0))]


STATEMENTS: dict[str, Callable[[World, int], Any]] = {
    "train": _train,
    "forward": _forward,
    "backward": _backward,
    "step": _step,
    "zero": _zero,
    "evaluate": _evaluate,
    "read": lambda w, _: [[p, p.grad] for p in w.parameters],
    "edit gradient": _edit_gradient,
    "edit weight": _edit_weight,
    "double": _double,
    "freeze": _freeze,
    "hold": _hold,
    "state": _state,
    "clip": lambda w, n: nn.utils.clip_grad_norm_(w.parameters, 0.1, foreach=[None, True, False][n % 3]),
    "clamp": lambda w, _: nn.utils.clip_grad_value_([p for p in w.parameters if p.grad is not None], 0.01),
    "schedule": lambda w, _: w.scheduler.step(),
    "differentiate": lambda w, n: torch.autograd.grad(w.loss("plain")[0], w.weight(n), allow_unused=True),
    "together": lambda w, _: sum(w.loss(kind)[0] for kind in ("plain", "one row")).backward(),
    "only some": lambda w, n: w.loss("plain")[0].backward(inputs=[w.weight(n), w.weight(n + 1)]),
    "recomputed": lambda w, n: _forward(w, n, lambda x: checkpoint(w.model, x, use_reentrant=n % 4 == 1)),
    "a block": lambda w, n: w.modules[n % len(w.modules)](w.input("plain")).square().mean().backward(),
    "load": lambda w, _: repr(w.model.load_state_dict(copy.deepcopy(w.model.state_dict()))),
    "copy": lambda w, _: copy.deepcopy(w.model)(w.input("plain")),
    "jacobian": lambda w, _: torch.autograd.functional.vjp(w.model, w.input("plain"), torch.ones(2, 3, W)),
}
_values = lambda w: {name: p.detach() * 0.5 for name, p in w.model.named_parameters()}
LAST: dict[str, Callable[[World, int], Any]] = {
    "nothing": lambda w, _: None,
    "of a strange class": lambda w, n: w.loss(STRANGE[n % 2])[0].backward(),
    "func.grad": lambda w, _: torch.func.grad(lambda x: w.model(x).sum())(w.input("plain")),
    "func.grad of a block": lambda w, _: torch.func.grad(lambda x: w.modules[-1](x).sum())(w.input("plain")),
    "func.grad of a weight": lambda w, n: torch.func.grad(lambda p: p.square().sum())(w.weight(n)),
    "func.grad beside": lambda w, n: torch.func.grad(lambda x: (x * w.weight(n).sum()).sum())(torch.ones(3)),
    "jvp": lambda w, _: torch.func.jvp(w.model, (w.input("plain"),), (w.input("plain"),)),
    "vmap": lambda w, _: torch.vmap(w.model, randomness="different")(w.input("plain")[:, None]),
    "jacrev": lambda w, _: torch.func.jacrev(w.model)(w.input("plain")),
    "functional_call": lambda w, _: torch.func.functional_call(w.model, _values(w), w.input("plain")),
    "functional_call, own": lambda w, _: torch.func.functional_call(
        w.model, dict(w.model.named_parameters()), w.input("plain")
    ),
    "grads of many": lambda w, n: torch.autograd.grad(
        w.model(w.input("plain")).mean(0)[0], w.weight(n), torch.eye(W), is_grads_batched=True, allow_unused=True
    ),
    "forward mode": lambda w, _: _dual(w),
    "no overrides": lambda w, _: _without_overrides(w),
}


def _dual(w: World) -> Any:
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(w.input("plain"), w.input("plain"))
        return torch.autograd.forward_ad.unpack_dual(w.model(x)).tangent


def _without_overrides(w: World) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return w.modules[-1](w.input("plain"))


# programs


@dataclass(frozen=True)
class Program:
    """What is run twice."""

    blocks: list[tuple[str, str, bool | None]]
    statements: list[tuple[str, int]]
    last: str = "nothing"
    hooks: list[tuple[str, int]] = ()  # type: ignore[assignment]
    around: str = ""
    budget: str = "roomy"
    kib: int = 64
    rest: int = 0
    second: str = "fused"
    in_backward: bool = False

    def run(self, world: World) -> Iterator[tuple[str, list[Any], Exception | None]]:
        """What each statement shows, and the error that ends it."""
        for number, (name, n) in enumerate([*self.statements, (self.last, len(self.statements))]):
            torch.manual_seed(number)
            world.number, world.seen[:] = number, []
            found, error = [], None
            with AROUND[self.around]() as around:
                try:
                    found = shown((STATEMENTS | LAST)[name](world, n))
                except Exception as problem:
                    error = problem
            flops = around.get_total_flops() if isinstance(around, FlopCounterMode) else 0
            yield name, [*found, *shown(world.seen), repr(flops)], error
            if error is not None:
                return


def programs() -> st.SearchStrategy[Program]:
    numbers = st.integers(0, 60)
    few = ["train", "train", "evaluate", "schedule", "hold", "read", "edit weight", "freeze", "copy"]
    block = st.tuples(
        st.sampled_from(list(BLOCKS)), st.sampled_from(list(AFTER)), st.sampled_from([None, None, None, True, False])
    )

    def of(in_backward: bool) -> st.SearchStrategy[Program]:
        names = few if in_backward else [*STATEMENTS, *["train", "forward", "backward", "step"] * 2]
        return st.builds(
            Program,
            blocks=st.lists(block, min_size=1, max_size=5),
            statements=st.lists(st.tuples(st.sampled_from(names), numbers), min_size=2, max_size=10),
            last=st.sampled_from(["nothing"] * len(LAST) + list(LAST)),
            hooks=st.lists(st.tuples(st.sampled_from(list(_hooks(print))), numbers), max_size=2),
            around=st.sampled_from(["", "", "", *AROUND]),
            budget=st.sampled_from(list(BUDGETS)),
            kib=st.integers(48, 128),
            rest=st.sampled_from([0, 0, 1, 3, 6]),
            second=st.sampled_from(list(SECOND)),
            in_backward=st.just(in_backward),
        )

    return st.sampled_from([False, False, False, True]).flatmap(of)


def compare(program: Program) -> str:
    """Runs a program twice, and compares; gives how it ended."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        warnings.simplefilter("ignore")
        plain = World(program)
        want = list(program.run(plain))

        def manage(model: nn.Module, optimizer: Any) -> Any:
            memory = BUDGETS[program.budget](f"{folder}/disk", program.kib * 1024)
            step = "in_backward" if program.in_backward else "deferred"
            session = patrickstar.manage(
                model, optimizer, precision="fp32", step=step, options=options(chunk_size=1024), **memory
            )
            stack.callback(session.close)
            return session

        try:
            world = World(program, manage)
        except patrickstar.Error as refusal:
            return f"not managed: {type(refusal).__name__}"
        for number, ((name, ours, raised), (_, theirs, error)) in enumerate(zip(want, program.run(world), strict=False)):
            if raised is not None:
                assert error is not None, f"statement {number}, {name}: plain PyTorch raises {raised!r}, nothing else does"
                return "both raise"
            if error is not None:
                if not isinstance(error, patrickstar.Error) and not any(text in str(error) for text in UNREADABLE):
                    raise AssertionError(f"statement {number}, {name}: {error!r}") from error
                return f"refused: {type(error).__name__} in {name}"
            expect_same(f"statement {number}, {name}", ours, theirs)
        ours = shown([plain.model.state_dict(), dict(sorted(states(plain.optimizer).items())), plain.second and plain.second.state_dict()])
        seen = dict(sorted(held_states(world.session).items()))
        theirs = shown([dict(world.session.state_dict()), seen, world.second and world.second.state_dict()])
        expect_same("at the end", ours, theirs)
        world.session.close()
        expect_same("closed", shown(plain.model.state_dict()), shown(world.model.state_dict()))
        return "equal"


def expect_same(where: str, want: list[Any], got: list[Any]) -> None:
    for number, (ours, theirs) in enumerate(itertools.zip_longest(want, got)):
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            assert same_bits(ours, theirs), describe(f"{where}, value {number}", ours, theirs)
        else:
            assert isinstance(ours, str) and ours == theirs, f"{where}, value {number}: want {ours}, got {theirs}"


def run(examples: int) -> None:
    ends: Counter[str] = Counter()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(programs())
    def program_shows_nothing_else(program: Program) -> None:
        end = compare(program)
        assert top_saved_tensors_hooks() is None, "hooks of saved tensors were left"
        event(end)
        ends[end] += 1

    program_shows_nothing_else()
    assert ends["equal"] > sum(ends.values()) / 3, f"few programs have run to their end: {ends}"


def test_a_random_program_has_the_bits_of_plain_pytorch_or_is_refused() -> None:
    run(examples=25)


@pytest.mark.campaign
def test_each_of_many_random_programs_has_the_bits_of_plain_pytorch_or_is_refused() -> None:
    run(examples=300)
