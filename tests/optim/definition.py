"""The definition of the update over whole tensors, on any processor and device: what kernels are compared with, and nothing of the library's.

Products that are added without being rounded are emulated, by operations that round each by itself. `oracle.py` has the same for one element, in
exact arithmetic, and checks this.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class Definition:
    """A kernel, `update`, of the formulas of `reference.py`, several times slower than any other."""

    @torch.no_grad()
    def update(
        self, weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, step: int, hyper: Any
    ) -> None:
        if hyper.weight_decay and hyper.decoupled:
            weight.mul_(fp32(1 - hyper.lr * hyper.weight_decay))
        if hyper.weight_decay and not hyper.decoupled:
            grad = exact_fma(weight, fp32(hyper.weight_decay), grad)
        exp_avg.copy_(self.average(exp_avg, grad, fp32(1 - hyper.beta1)))
        exp_avg_sq.copy_(self.square(exp_avg_sq, grad, fp32(hyper.beta2), fp32(1 - hyper.beta2)))
        # A GPU would take the reciprocal of a number of the host's.
        correction = torch.full((), fp32(math.sqrt(1 - hyper.beta2**step)), dtype=torch.float32, device=weight.device)
        denominator = root(exp_avg_sq) / correction + fp32(hyper.eps)
        weight.add_((exp_avg * fp32(-hyper.lr / (1 - hyper.beta1**step))) / denominator)

    def average(self, exp_avg: Tensor, grad: Tensor, blend: float) -> Tensor:
        """exp_avg, moved the share `blend` of the way to grad, from the nearer end."""
        way = grad - exp_avg
        return exact_fma(way, blend, exp_avg) if blend < 0.5 else exact_fma(way, blend - 1.0, grad)

    def square(self, exp_avg_sq: Tensor, grad: Tensor, keep: float, add: float) -> Tensor:
        """fma(add * grad, grad, exp_avg_sq * keep)."""
        return exact_fma(grad * add, grad, exp_avg_sq * keep)


def exact_fma(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """a * b + c of fp32 numbers, rounded once to fp32; b may be a number that fp32 holds exactly.

    The product of two 24-bit numbers is exact in double. Its sum with c is rounded there, and rounding that again to fp32 could go the wrong way at a
    tie. So the sum is first rounded *to odd*: if inexact, to the neighbour whose last bit is 1. After that a second rounding to less than 52 bits,
    subnormal numbers included, gives what a single one gives.
    Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd".
    """
    product = a.double() * (b.double() if isinstance(b, Tensor) else b)
    addend = c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)  # Knuth's two-sum: total + error is the sum, exactly
    bits = total.view(torch.int64)
    # One step away from zero where the sum was rounded towards it, else one step back. NaN and Inf stay as they are.
    away = torch.where((error > 0) == (total > 0), 1, -1)
    inexact_and_even = (error != 0) & torch.isfinite(total) & ((bits & 1) == 0)
    return (bits + away * inexact_and_even).view(torch.float64).float()


def root(x: Tensor) -> Tensor:
    """The square root as IEEE has it for fp32: that of a double, which has more than twice the digits and two to spare, rounded."""
    return x.double().sqrt().float()


def fp32(value: float) -> float:
    """The nearest fp32 number; infinite where fp32 cannot hold it."""
    return torch.tensor(value, dtype=torch.float64, device="cpu").float().item()
