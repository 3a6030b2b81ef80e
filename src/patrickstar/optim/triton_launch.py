"""Launches of Triton kernels over flat planes. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from patrickstar.optim import triton_kernels as kernels
from patrickstar.optim.masters import blocks

WIDENED = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Types that kernels widen to fp32 as they read them."""


def launch(kernel: Any, planes: Sequence[Tensor | None], *arguments: object, **constants: object) -> None:
    """Launches a kernel over planes of one length, from None to as many times as Note [Offsets] in `triton_kernels.py` asks for.

    Args:
        kernel: takes the planes, the number of elements, these arguments and constants, and `block_numel`.
        planes: flat and contiguous, on one device, the first of them there; None stands for one that is not. No elements, no launch.
    """
    first = planes[0]
    assert first is not None
    for plane in planes:
        assert plane is None or plane.dim() == 1, "a plane must be flat"
        assert plane is None or plane.is_contiguous(), "a plane must be contiguous"
        assert plane is None or plane.device == first.device, "planes on several devices"
        assert plane is None or plane.numel() == first.numel(), "planes of several lengths"
    with current(first.device):
        for span in blocks(first.numel(), of=kernels.LAUNCH_NUMEL):
            numel = span.stop - span.start
            kernel[(-(-numel // kernels.BLOCK_NUMEL),)](
                *(None if plane is None else plane[span] for plane in planes),
                numel,
                *arguments,
                **constants,
                block_numel=kernels.BLOCK_NUMEL,
                **kernels.OPTIONS,
            )


def factor_arguments(
    factors: Sequence[Tensor], device: torch.device
) -> tuple[tuple[Tensor | float, ...], tuple[bool, ...]]:
    """Factors as a kernel takes them, and which of them it reads in memory: those on its device. One on the host is a number, without a wait."""
    for factor in factors:
        assert factor.dim() == 0, f"a factor of shape {tuple(factor.shape)}"
        assert factor.dtype is torch.float32, f"a factor of {factor.dtype}"
        assert factor.is_cpu or factor.device == device, f"a factor on {factor.device} for planes on {device}"
    in_memory = tuple(factor.device == device for factor in factors)
    numbers = tuple(factor if is_there else float(factor) for factor, is_there in zip(factors, in_memory, strict=True))
    return numbers, in_memory


def current(device: torch.device) -> AbstractContextManager[object]:
    """A context in which launches go to this device, on its current stream: Triton asks torch for them."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
