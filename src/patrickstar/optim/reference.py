"""The update in torch's operations, for what its fused kernel does not do: the last elements of a plane on the host, and devices without Triton."""

from __future__ import annotations

import torch

from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.optim.hyper import Coefficients, Hyper
from patrickstar.optim.kernel import check_planes
from patrickstar.optim.scratch import block_numel

BLOCK_NUMEL = 8_192
"""Elements updated at once, so that temporaries are few. Blocks this small also stay on the calling thread: torch splits an operation over its OpenMP
team from 32,768 elements on."""


@torch.no_grad()
def update(*planes: torch.Tensor, step: int, hyper: Hyper) -> None:
    """The formulas of `kernel.py`, line by line.

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
        exp_avg.lerp_(grad, scalars.blend)  # from the nearer end: Note [Lerp] in `kernel.py`
        exp_avg_sq.mul_(scalars.keep_sq).addcmul_(grad, grad, value=scalars.add_sq)
        # torch.sqrt of fp32 is MKL's and not correctly rounded; the root in double, rounded to fp32, is.
        # By a tensor that is there: on a GPU torch divides by a number of the host as it multiplies with its reciprocal, which rounds twice.
        root = torch.full((), scalars.root, dtype=torch.float32, device=weight.device)
        denominator = exp_avg_sq.double().sqrt_().float().div_(root).add_(scalars.eps)
        # Not addcdiv_: what it fuses is left to the compiler in torch's baseline code. Nothing is fused in this line.
        weight.add_((exp_avg * scalars.move).div_(denominator))


def scratch_bytes(numel: int) -> int:
    """The most bytes that an update of so many elements takes of a device beside the planes."""
    block = min(numel, block_numel(numel, most=BLOCK_NUMEL))
    return cuda_block_bytes(4 * block) + 2 * cuda_block_bytes(8 * block)
