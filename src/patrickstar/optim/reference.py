"""One Adam or AdamW update over flat runs of elements: the definition, the kernel in torch's operations, and torch's own one-pass kernels.

The one in torch's operations is for what the fused ones do not do: the last elements of a plane on the host, and devices without Triton.

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

from collections.abc import Callable, Sequence

import torch

from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.optim.hyper import Coefficients, Hyper
from patrickstar.optim.masters import block_numel

Kernel = Callable[..., None]
"""Called as `kernel(weight, grad, exp_avg, exp_avg_sq, step=step, hyper=hyper)`; changes all but the gradient in place. The planes are flat,
contiguous, fp32, on one device, of equal length, at any address; `step` is the number of this update for them, counting from 1. Kernels differ in
speed, never in a bit."""

BLOCK_NUMEL = 8_192
"""Elements updated at once, so that temporaries are few. Blocks this small also stay on the calling thread: torch splits an operation over its OpenMP
team from 32,768 elements on."""

VECTOR_NUMEL = 16
"""Elements of the widest vector (AVX-512). torch's kernels work in whole vectors of this many, on every thread, and
after the last one in a scalar loop that is contracted differently. Where the elements lie in memory changes no bits."""

LARGEST_STEP = 2**24
"""torch takes the step as fp32, which counts no further."""


@torch.no_grad()
def update(*planes: torch.Tensor, step: int, hyper: Hyper) -> None:
    """The formulas above, line by line.

    torch's `lerp_`, `addcmul_` and `add(alpha=)` add a product without rounding it where its code is fused, also in the last elements of a tensor.
    Nowhere else is anything updated: `choose_kernels` asks.
    """
    check_planes(*planes, step=step)
    scalars = Coefficients.at(hyper, step)
    whole = planes[0].numel()
    numel = BLOCK_NUMEL if planes[0].is_cpu else block_numel(whole, most=BLOCK_NUMEL)
    for start in range(0, whole, numel):
        weight, grad, exp_avg, exp_avg_sq = (plane[start : start + numel] for plane in planes)
        if scalars.shrink is not None:
            weight.mul_(scalars.shrink)
        if scalars.l2 is not None:
            grad = grad.add(weight, alpha=scalars.l2)
        exp_avg.lerp_(grad, scalars.blend)  # from the nearer end: Note [Lerp]
        exp_avg_sq.mul_(scalars.keep_sq).addcmul_(grad, grad, value=scalars.add_sq)
        # torch.sqrt of fp32 is MKL's and not correctly rounded; the root in double, rounded to fp32, is.
        # By a tensor that is there: on a GPU torch divides by a number of the host as it multiplies with its reciprocal, which rounds twice.
        root = torch.full((), scalars.root, dtype=torch.float32, device=weight.device)
        denominator = exp_avg_sq.double().sqrt_().float().div_(root).add_(scalars.eps)
        # Not addcdiv_: what it fuses is left to the compiler in torch's baseline code. Nothing is fused in this line.
        weight.add_((exp_avg * scalars.move).div_(denominator))


def update_fused(*planes: torch.Tensor, step: int, hyper: Hyper) -> None:
    """Updates one tensor by torch's kernel."""
    update_all_fused([planes], step=step, hyper=hyper)


def update_all_fused(tensors: Sequence[tuple[torch.Tensor, ...]], *, step: int, hyper: Hyper) -> None:
    """One call of `torch._fused_adamw_` or `torch._fused_adam_`: bit-equal to the reference at every length and address.

    They are the definition where torch's code for this machine is fused, and are used nowhere else: `choose_kernel` asks. A
    length that is a multiple of 16 needs no second part; tensors in chunks are padded to that.
    """
    bodies, rests = list[tuple[torch.Tensor, ...]](), list[tuple[torch.Tensor, ...]]()
    for planes in tensors:
        check_planes(*planes, step=step)
        numel = planes[0].numel()
        body = numel - numel % VECTOR_NUMEL if step <= LARGEST_STEP else 0
        # Slicing four planes takes as long as updating a small one.
        if body:
            bodies.append(planes if body == numel else tuple([plane[:body] for plane in planes]))
        if body < numel:
            rests.append(tuple([plane[body:] for plane in planes]))
    if bodies:
        fused = torch._fused_adamw_ if hyper.decoupled else torch._fused_adam_
        weights, gradients, exp_avgs, exp_avg_sqs = map(list, zip(*bodies, strict=True))
        fused(
            weights,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            [torch.full((), float(step), dtype=torch.float32, device="cpu")] * len(bodies),
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=False,
        )
    for rest in rests:
        update(*rest, step=step, hyper=hyper)


def scratch_bytes(numel: int) -> int:
    """The most bytes that an update of so many elements takes of a device beside the planes."""
    block = min(numel, block_numel(numel, most=BLOCK_NUMEL))
    return cuda_block_bytes(4 * block) + 2 * cuda_block_bytes(8 * block)


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
