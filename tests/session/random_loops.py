"""Statements of random programs: what a loop does with a model, by name, and a number that says how."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.session.builders import adamw
from tests.session.random_parts import INPUTS, SECOND, STRANGE, Net, W, hooks


class World:
    """A model, plain or managed, and what a loop has."""

    def __init__(self, program: Any, manage: Callable[[nn.Module, Any], Any] | None = None) -> None:
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
            hooks(lambda *given: self.seen.append(shown(given)))[kind](self.modules[place % len(self.modules)])

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
    "clamp": lambda w, _: w.parameters[0].grad is not None and nn.utils.clip_grad_value_(w.parameters, 0.01),
    "schedule": lambda w, _: w.scheduler.step(),
    "differentiate": lambda w, n: torch.autograd.grad(w.loss("plain")[0], w.weight(n), allow_unused=True),
    "together": lambda w, _: sum(w.loss(kind)[0] for kind in ("plain", "one row")).backward(),
    "only some": lambda w, n: w.loss("plain")[0].backward(inputs=[w.weight(n), w.weight(n + 1)]),
    "recomputed": lambda w, n: _forward(w, n, lambda x: checkpoint(w.model, x, use_reentrant=n % 4 == 1)),
    "a block": lambda w, n: w.modules[n % len(w.modules)](w.input("plain")).square().mean().backward(),
    "load": lambda w, _: repr(w.model.load_state_dict(copy.deepcopy(w.model.state_dict()))),
    "copy": lambda w, _: copy.deepcopy(w.model)(w.input("plain")),
    "jacobian": lambda w, _: torch.autograd.functional.vjp(w.modules[1], w.input("plain"), torch.ones(2, 3, W)),
}
_values = lambda w: {name: p.detach() * 0.5 for name, p in w.model.named_parameters()}
LAST: dict[str, Callable[[World, int], Any]] = {
    "nothing": lambda w, _: None,
    "of a strange class": lambda w, n: (w.loss(STRANGE[n % 2])[0].backward(), _step(w, n)),
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
