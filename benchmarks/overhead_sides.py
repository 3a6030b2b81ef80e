"""The two sides of `overhead.py`, a step of each in turn, and what their times come to."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

import patrickstar

__all__ = ["LR", "WARM_UP", "alike", "interval", "kept_by_hand", "managed_step", "measure", "plain_step", "ratios_of"]

LR: Final = 1e-4
WARM_UP: Final = 2
# Of losses in bf16 after the first.
TOLERANCE: Final = 5e-3

Step = Callable[[Tensor], Tensor]


def plain_step(model: Any, precision: str) -> Step:
    """A step of an ordinary loop, which gives the loss. The model becomes what the precision says."""
    masters = list(model.parameters()) if precision == "fp32" else kept_by_hand(model)
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)
    if precision == "fp32":
        return lambda batch: one_step(model, batch, optimizer.step, optimizer.zero_grad)
    weights = list(model.parameters())

    @torch.no_grad()
    def update() -> None:
        for weight, master in zip(weights, masters, strict=True):
            master.grad.copy_(weight.grad)  # in place: memory that is made anew at each step costs page faults
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)

    return lambda batch: one_step(model, batch, update, model.zero_grad)


def kept_by_hand(model: nn.Module) -> list[Any]:
    """fp32 masters of all parameters, with gradients of their own; the parameters are of bf16 then."""
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    for master in masters:
        master.grad = torch.zeros_like(master)
    model.bfloat16()
    return masters


def managed_step(model: Any, session: patrickstar.Session) -> Step:
    """The same on a session."""
    optimizer = session.optimizer
    assert optimizer is not None
    return lambda batch: one_step(model, batch, optimizer.step, optimizer.zero_grad)


def one_step(model: Any, batch: Tensor, update: Callable[[], object], let_go: Callable[[], object]) -> Tensor:
    """One step, the gradients let go at its end."""
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    loss.backward()
    update()
    let_go()
    return loss.detach()


def measure(steps: dict[str, Step], given: Iterable[Tensor], *, exact: bool) -> tuple[dict[str, list[float]], str]:
    """Seconds of each step by name, without the rounds that warm up; and which losses differ that must not.

    Args:
        exact: whether all losses must have the same bits, or only the first.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number, batch in enumerate(given):
        losses: dict[str, float] = {}
        for name in steps if number % 2 else reversed(steps):
            began = time.perf_counter()
            loss = steps[name](batch)
            taken = time.perf_counter() - began
            losses[name] = loss.item()
            if number >= WARM_UP:  # the first rounds plan, import and warm up
                seconds[name].append(taken)
        if not alike(losses["plain"], losses["managed"], within=0.0 if exact or not number else TOLERANCE):
            return seconds, f"round {number}: losses differ: {losses}"
        if number >= WARM_UP:
            shown = ", ".join(f"{name} {taken[-1]:.3f} s" for name, taken in seconds.items())
            print(f"round {number - WARM_UP + 1}: {shown}", flush=True)
    return seconds, ""


def alike(one: float, other: float, *, within: float) -> bool:
    """Whether two losses are as near as that, relatively."""
    return abs(one - other) <= within * abs(one)


def ratios_of(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """The figures of merit: managed over plain."""
    managed, plain = seconds["managed"], seconds["plain"]
    return {
        "ratio_of_medians": statistics.median(managed) / statistics.median(plain),
        "ratio_of_minima": min(managed) / min(plain),
        "ratios": sorted(one / other for one, other in zip(managed, plain, strict=True)),
    }


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """The median's interval of at least 90 %, from the order of the values alone; all of them where they are fewer than five."""
    n = len(ordered)
    below = [sum(math.comb(n, count) for count in range(rank + 1)) / 2**n for rank in range(n // 2)]
    rank = max(0, sum(share <= 0.05 for share in below) - 1)
    return ordered[rank], ordered[n - 1 - rank]
