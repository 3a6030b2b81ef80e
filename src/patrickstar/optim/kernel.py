"""Optimizer kernels: one Adam or AdamW update over flat runs of elements.

The bits of the update are defined once, for every kernel: they are those of torch's `_fused_adamw_` and `_fused_adam_`
where the processor fuses multiply-adds. With f(x) rounding a double to fp32 and fma(a, b, c) = a * b + c rounded once:

    AdamW   p *= f(1 - lr wd)                                           where wd is not 0
    Adam    g  = fma(f(wd), p, g)                                       where wd is not 0
    m = fma(f(1 - b1), g - m, m)                                        where f(1 - b1) < 1/2
      = fma(f(f(1 - b1) - 1), g - m, g)                                 else: see Note [Lerp]
    v = fma(f(1 - b2) * g, g, v * f(b2))
    d = sqrt(v) / f(sqrt(1 - b2^t)) + f(eps)                            the root is IEEE's
    p = p + (f(-lr / (1 - b1^t)) * m) / d

Note [Lerp]
-----------
torch's `lerp_` starts from the nearer end: from the gradient where the weight is 1/2 or more, that is for b1 <= 0.5.
All of torch's Adams do so; with b1 = 0 it makes `m` the gradient itself, which the first form misses by a rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Kernel = Callable[..., None]
"""Called as `kernel(weight, grad, exp_avg, exp_avg_sq, step=step, hyper=hyper)`; changes all but the gradient in place. The planes are flat,
contiguous, fp32, on one device, of equal length, at any address; `step` is the number of this update for them, counting from 1. Kernels differ in
speed, never in a bit."""


def check_planes(*planes: torch.Tensor, step: int) -> None:
    """Catches a caller's mistake before raw memory is touched, for torch's fused kernel trusts its arguments."""
    weight = planes[0]
    numel, device = weight.numel(), weight.device
    for plane in planes:
        assert plane.dim() == 1, f"a plane must be flat, not {tuple(plane.shape)}"
        assert plane.is_contiguous(), f"a plane must be contiguous, not of stride {plane.stride()}"
        assert plane.dtype is torch.float32, f"a plane of {plane.dtype}"
        assert plane.device == device, f"planes on {device} and {plane.device}"
        assert plane.numel() == numel, f"planes of {numel} and {plane.numel()} elements"
    assert step >= 1, f"step {step}: the first update is number 1"
