"""A model twice: in 16 bits under a session, and in plain PyTorch with fp32 masters kept by hand. In fp32 the plain one is its own master."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import patrickstar
from tests.parity.oracle import Types, narrow
from tests.session.builders import TIGHT, adamw, batch, mlp, options

KINDS = ("bf16", "bf16-fp32", "fp16", "fp16-fp32")
"""What weights are kept in, and what they compute in where that is another type."""

SCALE = 1024.0
"""Of losses in fp16: fixed, so that nothing is skipped."""


class Twin:
    """A model of 16-bit weights in the type that computes, and an fp32 one that is updated. In fp32 they are one.

    Attributes:
        unrounded: whether gradients are kept as they arrive: since one was added to another, was written into, or was assigned and used.
        own: parameters whose gradient was assigned.
    """

    def __init__(self, kind: str = "bf16", build: Callable[[], nn.Module] = mlp) -> None:
        self.types = Types.of(kind)
        self.masters = build()
        self.optimizer = adamw(self.masters)
        self.scale = SCALE if self.types and self.types.scales else 1.0
        self.unrounded = False
        self.own: set[str] = set()
        self.model = build() if self.types else self.masters
        self.whole = {name for name, _ in self.masters.named_parameters() if "norm" in name}
        for name, master in self.masters.named_parameters():
            if not master.requires_grad:  # its rounded weight is all there is
                master.data = self.rounded(name, master.detach()).float()
        self.narrow()

    @property
    def compute(self) -> torch.dtype:
        """What weights and inputs are in."""
        return self.types.compute if self.types else torch.float32

    def rounded(self, name: str, master: Tensor) -> Tensor:
        """The weight that stands for a master."""
        if self.types is None or name in self.whole:
            return master.clone()
        return narrow(master, self.types.kept).to(self.types.compute)

    def narrow(self) -> None:
        """Weights are the masters, rounded."""
        if self.types is None:
            return
        for (name, master), weight in zip(self.masters.named_parameters(), self.model.parameters(), strict=True):
            weight.data = self.rounded(name, master.detach())

    def carry(self) -> None:
        """Weights that were changed by hand become their masters, element by element."""
        if self.types is None:
            return
        for (name, master), weight in zip(self.masters.named_parameters(), self.model.parameters(), strict=True):
            was = self.rounded(name, master.detach())
            master.data = torch.where(was == weight, master.detach(), weight.detach().float())
        self.narrow()

    def backward_of(
        self, loss: Tensor, *, adds_up: bool = False, retain_graph: bool = False, inputs: list[Tensor] | None = None
    ) -> None:
        """Gradients of a loss, added in fp32 to what the masters have. `adds_up`: none of them is rounded to the type that is kept."""
        if self.types is None:
            loss.backward(retain_graph=retain_graph, inputs=inputs)
            return
        (loss * self.scale).backward(retain_graph=retain_graph, inputs=inputs)
        pairs = list(zip(self.masters.named_parameters(), self.model.parameters(), strict=True))
        for (name, master), weight in reversed(pairs):  # as they arrive
            if weight.grad is None:
                continue
            if name in self.own and master.grad is not None:  # to which autograd adds
                master.grad = (master.grad.to(weight.dtype) + weight.grad).float()
                weight.grad = None
                continue
            self.unrounded |= master.grad is not None
            kept = weight.grad if adds_up or self.unrounded or name in self.whole else weight.grad.to(self.types.kept)
            wide = kept.float() / self.scale
            master.grad = wide if master.grad is None else master.grad + wide
            weight.grad = None

    def change_gradients(self, change: Callable[[nn.Module], Any]) -> Any:
        """What a change through `.grad` means: `.grad` is of the parameter's type, and an element that has other bits afterwards is widened."""
        if self.types is None:
            return change(self.model)
        pairs = list(zip(self.masters.parameters(), self.model.parameters(), strict=True))
        for master, weight in pairs:
            weight.grad = None if master.grad is None else master.grad.to(weight.dtype)
        shown = [None if weight.grad is None else weight.grad.clone() for _, weight in pairs]
        result = change(self.model)
        for (master, weight), before in zip(pairs, shown, strict=True):
            if weight.grad is None:
                master.grad = None
            elif before is None or master.grad is None:
                master.grad = weight.grad.float()
            else:
                bits = torch.int16 if before.element_size() == 2 else torch.int32
                changed = before.view(bits) != weight.grad.view(bits)
                master.grad = torch.where(changed, weight.grad.float(), master.grad)
            weight.grad = None
        return result

    def multiply(self, factor: Tensor) -> None:
        """Multiplies gradients with a factor (0-dim fp32): in fp32, or in their own type where they were assigned."""
        for (name, master), weight in zip(self.masters.named_parameters(), self.model.parameters(), strict=True):
            if master.grad is not None and name in self.own:
                master.grad = (master.grad.to(weight.dtype) * factor).float()
            elif master.grad is not None:
                master.grad = master.grad * factor

    def update(self) -> None:
        """The optimizer's step."""
        grads = {name: master.grad for name, master in self.masters.named_parameters()}
        self.unrounded |= any(grads[name] is not None for name in self.own)
        self.optimizer.step()
        self.narrow()


def managed_step(session: Any, model: nn.Module, *, first: int = 0) -> None:
    session.scaler.scale(model(batch(first)).float().square().mean()).backward()
    session.scaler.step(session.optimizer)
    session.scaler.update()
    session.optimizer.zero_grad()


def in_kind(kind: str, *, scale: float = SCALE, **given: Any) -> dict[str, Any]:
    """Arguments of `manage` for a kind such as "fp32" or "bf16-fp32", and for these options. A loss scale stays, so that no step is skipped."""
    kept, _, compute = kind.partition("-")
    stays = patrickstar.LossScale(initial=scale, dynamic=False)
    return {"precision": kept, "options": options(**{"compute": compute or kept, "loss_scale": stays, **given})}


def manage(
    model: nn.Module, kind: str = "bf16", *, optimizer: Any = None, given: dict[str, Any] | None = None, **keywords: Any
) -> patrickstar.Session:
    """`keywords`: of `manage`; without a budget, the tight one of the emulated device."""
    return patrickstar.manage(
        model,
        optimizer or adamw(model),
        **in_kind(kind, **(given or {})),
        **(keywords if keywords.keys() - {"step"} else {"device": "emulated", "device_memory": TIGHT, **keywords}),
    )
