"""torch's own one-pass kernels over whole vectors, and the reference for what is left."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from patrickstar.optim import reference
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.reference import check_planes

VECTOR_NUMEL = 16
"""Elements of the widest vector (AVX-512). torch's kernels work in whole vectors of this many, on every thread, and
after the last one in a scalar loop that is contracted differently. Where the elements lie in memory changes no bits."""

LARGEST_STEP = 2**24
"""torch takes the step as fp32, which counts no further."""


def update(*planes: torch.Tensor, step: int, hyper: Hyper) -> None:
    """Updates one tensor."""
    update_all([planes], step=step, hyper=hyper)


def update_all(tensors: Sequence[tuple[torch.Tensor, ...]], *, step: int, hyper: Hyper) -> None:
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
        reference.update(*rest, step=step, hyper=hyper)
