"""The definition of the update in torch operations: the kernel that needs nothing, and the oracle of the others."""

from __future__ import annotations

import torch

from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.optim.fma import Operations, fusing_operations
from patrickstar.optim.hyper import Coefficients, Hyper
from patrickstar.optim.kernel import check_planes
from patrickstar.optim.scratch import block_numel

__all__ = ["BLOCK_NUMEL", "Reference"]

BLOCK_NUMEL = 8_192
"""Elements updated at once. An emulated fma holds some 64 bytes an element: half a MiB of temporaries. Blocks this small
also stay on the calling thread: torch splits an operation over its OpenMP team from 32,768 elements on."""


class Reference:
    """The formulas of `kernel.py`, line by line.

    Holds on every machine: where torch's operations are not fused they are emulated (`fma.py`).
    """

    name = "reference"

    def __init__(self, *, operations: Operations | None = None) -> None:
        self._operations = operations or fusing_operations()

    def scratch_bytes(self, numel: int) -> int:
        """The most bytes that an update of so many elements takes of a device beside the planes."""
        block = min(numel, block_numel(numel, most=BLOCK_NUMEL))
        return self._operations.scratch_bytes(block) + 2 * cuda_block_bytes(8 * block)

    @torch.no_grad()
    def update(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        *,
        step: int,
        hyper: Hyper,
    ) -> None:
        check_planes(weight, grad, exp_avg, exp_avg_sq, step=step)
        scalars = Coefficients.at(hyper, step)
        numel = BLOCK_NUMEL if weight.is_cpu else block_numel(weight.numel(), most=BLOCK_NUMEL)
        for start in range(0, weight.numel(), numel):
            block = slice(start, start + numel)
            self._update_block(weight[block], grad[block], exp_avg[block], exp_avg_sq[block], scalars)

    def _update_block(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        scalars: Coefficients,
    ) -> None:
        if scalars.shrink is not None:
            weight.mul_(scalars.shrink)
        if scalars.l2 is not None:
            grad = self._operations.plus_scaled(grad, weight, scalars.l2)
        self._operations.lerp_(exp_avg, grad, scalars.blend)
        self._operations.decay_square_(exp_avg_sq, grad, scalars.keep_sq, scalars.add_sq)
        # torch.sqrt of fp32 is MKL's and not correctly rounded; the root in double, rounded to fp32, is.
        denominator = exp_avg_sq.double().sqrt_().float().div_(scalars.root).add_(scalars.eps)
        # Not addcdiv_: what it fuses is left to the compiler in torch's baseline code. Nothing is fused in this line.
        weight.add_((exp_avg * scalars.move).div_(denominator))
