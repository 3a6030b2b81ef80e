"""torch's own one-pass kernels over whole vectors, and the reference for what is left."""

from __future__ import annotations

import torch

from patrickstar.optim import reference
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.kernel import Kernel, check_planes

__all__ = ["FUSED", "VECTOR_NUMEL"]

VECTOR_NUMEL = 16
"""Elements of the widest vector (AVX-512). torch's kernels work in whole vectors of this many, on every thread, and
after the last one in a scalar loop that is contracted differently. Where the elements lie in memory changes no bits."""

LARGEST_STEP = 2**24
"""torch takes the step as fp32, which counts no further."""


@torch.no_grad()
def update(
    weight: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    hyper: Hyper,
) -> None:
    """`torch._fused_adamw_` and `torch._fused_adam_`: bit-equal to the reference at every length and address.

    They are the definition where torch's code for this machine is fused, and are used nowhere else: `choose_kernel` asks. A
    length that is a multiple of 16 needs no second part; tensors in chunks are padded to that.
    """
    planes = (weight, grad, exp_avg, exp_avg_sq)
    check_planes(*planes, step=step)
    numel = weight.numel()
    body = numel - numel % VECTOR_NUMEL if step <= LARGEST_STEP else 0
    if body:
        fused = torch._fused_adamw_ if hyper.decoupled else torch._fused_adam_
        # Slicing four planes takes as long as updating a small one.
        whole = planes if body == numel else tuple(plane[:body] for plane in planes)
        fused(
            [whole[0]],
            [whole[1]],
            [whole[2]],
            [whole[3]],
            [],
            [torch.full((), float(step), dtype=torch.float32, device="cpu")],
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=False,
        )
    if body < numel:
        rest = (plane[body:] for plane in planes)
        reference.update(*rest, step=step, hyper=hyper)


FUSED = Kernel("torch", update)
