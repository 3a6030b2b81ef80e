"""Passes over planes on a GPU, by Triton: one launch each. Imports triton: only `choose_kernels` imports this, where there is a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from patrickstar.optim import triton_kernels as kernels
from patrickstar.optim.hyper import Coefficients, Hyper
from patrickstar.optim.masters import rest_type
from patrickstar.optim.norm import GlobalNorm
from patrickstar.optim.passes import Passes
from patrickstar.optim.scratch import PassBytes, triton_bytes
from patrickstar.optim.triton_launch import WIDENED, factor_arguments, launch
from patrickstar.optim.triton_norm import TritonNorm


class TritonPasses(Passes):
    """Passes by the kernels of `triton_kernels.py`. Each queues its work on the current stream and waits for nothing."""

    @torch.no_grad()
    def update(
        self,
        weight: Tensor,
        rest: Tensor | None,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        step: int,
        hyper: Hyper,
        factors: Sequence[Tensor] = (),
    ) -> None:
        assert rest is not None or weight.dtype is torch.float32, f"a weight of {weight.dtype}"
        assert rest is None or _are_parts(weight, rest), f"a weight of {weight.dtype}, a rest of {rest.dtype}"
        assert grad.dtype in WIDENED, f"a gradient of {grad.dtype}"
        assert exp_avg.dtype is exp_avg_sq.dtype is torch.float32, f"states of {exp_avg.dtype}, {exp_avg_sq.dtype}"
        assert step >= 1, f"step {step}: the first update is number 1"
        scalars = Coefficients.at(hyper, step)
        is_nearer_grad = not abs(scalars.blend) < 0.5  # Note [Lerp] in reference.py
        numbers, in_memory = factor_arguments(factors, weight.device)
        launch(
            kernels.update_kernel,
            (weight, rest, grad, exp_avg, exp_avg_sq),
            numbers,
            scalars.shrink,
            scalars.l2,
            scalars.blend - 1.0 if is_nearer_grad else scalars.blend,
            scalars.keep_sq,
            scalars.add_sq,
            scalars.root,
            scalars.eps,
            scalars.move,
            in_memory=in_memory,
            is_nearer_grad=is_nearer_grad,
        )

    @torch.no_grad()
    def put(self, target: Tensor, source: Tensor, *, adds: bool, is_finite: Tensor | None = None) -> None:
        if is_finite is not None:
            _check_flag(is_finite, target)
        assert target.dtype in WIDENED, f"a plane of {target.dtype}"
        # What comes over a link, or has a type that no plane has, is torch's to copy.
        if source.device == target.device and source.dtype in WIDENED:
            launch(kernels.put_kernel, (target, source), is_finite, (), in_memory=(), adds=adds)
        else:
            super().put(target, source, adds=adds, is_finite=is_finite)

    @torch.no_grad()
    def look(self, piece: Tensor, is_finite: Tensor) -> None:
        assert piece.dtype in WIDENED, f"a piece of {piece.dtype}"
        _check_flag(is_finite, piece)
        launch(kernels.look_kernel, (piece,), is_finite)

    def norm(self, device: torch.device | None, *, largest: int | None = None) -> GlobalNorm:
        assert device is not None, "a norm of the host's is another family's"
        return TritonNorm(device, largest=largest)

    def scratch_bytes(self, numel: int, *, is_split: bool, largest: int, tensors: int) -> PassBytes:  # noqa: ARG002
        return triton_bytes(largest, tensors)  # one launch updates in registers


def _check_flag(is_finite: Tensor, piece: Tensor) -> None:
    assert is_finite.dtype is torch.int32, f"a flag of {is_finite.dtype}"
    assert is_finite.dim() == 0, f"a flag of shape {tuple(is_finite.shape)}"
    assert is_finite.device == piece.device, f"a flag on {is_finite.device} for a piece on {piece.device}"


def _are_parts(weight: Tensor, rest: Tensor) -> bool:
    return weight.dtype in (torch.bfloat16, torch.float16) and rest.dtype is rest_type(weight.dtype)
