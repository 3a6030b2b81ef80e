"""Passes over planes on a GPU, by Triton: one launch each, on the current stream, and none waits. The global norm: by the tree of `GlobalNorm`.

Imports triton: only `choose_kernels` imports this, where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from patrickstar.optim import triton_kernels as kernels
from patrickstar.optim.hyper import Coefficients, Hyper
from patrickstar.optim.masters import blocks, rest_type
from patrickstar.optim.norm import BLOCK_NUMEL, GlobalNorm
from patrickstar.optim.passes import PassBytes, Passes, triton_bytes

_SUBTREE_NUMEL = 16 << kernels.SUBTREE_LEVELS
_TREE_LEVELS = 12 - kernels.SUBTREE_LEVELS  # a block is 2**12 rows of 16
_SPAN_NUMEL = 1 << 24  # summed by one launch: 1 MiB of scratch
_NUMBERS = 32  # of blocks, by one program: one of each thread

WIDENED = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Types that kernels widen to fp32 as they read them."""


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
        if rest is None:
            assert weight.dtype is torch.float32, f"a weight of {weight.dtype}"
        else:
            expected = rest_type(weight.dtype) if weight.dtype in (torch.bfloat16, torch.float16) else None
            assert rest.dtype is expected, f"a weight of {weight.dtype}, a rest of {rest.dtype}"
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


class TritonNorm(GlobalNorm):
    """Adds up squares as `GlobalNorm` does, with its bits: 4 (or 2) bytes an element are read once, and 1/16 byte is written.

    Blocks that lie in a piece are summed where they lie; what is left of one at a piece's ends is collected in fp32 until it is whole.
    """

    def _take_scratch(self, largest: int | None) -> None:
        # Of smaller tensors one launch sums no more than there is.
        most = _SPAN_NUMEL if largest is None else max(1, -(-largest // BLOCK_NUMEL)) * BLOCK_NUMEL
        self._span = min(_SPAN_NUMEL, most)
        self._collected = torch.empty(BLOCK_NUMEL, device=self._device)
        self._subtrees = torch.empty(self._span // _SUBTREE_NUMEL * 16, dtype=torch.float64, device=self._device)
        self._rows = torch.empty(self._span // BLOCK_NUMEL * 16, dtype=torch.float64, device=self._device)

    @torch.no_grad()
    def add(self, piece: Tensor, factors: Sequence[Tensor] = ()) -> None:
        assert piece.dim() == 1, f"a piece must be flat, not {tuple(piece.shape)}"
        is_here = piece.device == self._device and piece.dtype in WIDENED
        start = 0
        while start < piece.numel():
            left = piece.numel() - start
            if is_here and not self._filled and left >= BLOCK_NUMEL:
                taken = left - left % BLOCK_NUMEL
                self._sum_of(piece[start : start + taken], factors)
            else:
                taken = min(left, BLOCK_NUMEL - self._filled)
                self._collect(piece[start : start + taken], factors, is_here=is_here)
            start += taken

    def end_tensor(self) -> None:
        filled, self._filled = self._filled, 0
        if filled:
            self._sum_of(self._collected[:filled], ())

    def _collect(self, part: Tensor, factors: Sequence[Tensor], *, is_here: bool) -> None:
        """Keeps a part of a block, which ends where the block does or before, and sums the block when it is whole."""
        target = self._collected[self._filled : self._filled + part.numel()]
        if is_here:
            numbers, in_memory = factor_arguments(factors, self._device)
            launch(kernels.put_kernel, (target, part), None, numbers, in_memory=in_memory, adds=False)
        else:
            target.copy_(part)
            for factor in factors:
                target.mul_(factor)
        self._filled += part.numel()
        if self._filled == BLOCK_NUMEL:
            self.end_tensor()

    def _sum_of(self, part: Tensor, factors: Sequence[Tensor]) -> None:
        """Adds blocks to the total, of which the last one may be cut."""
        scales, in_memory = factor_arguments(factors, self._device)
        with current(self._device):
            for span in blocks(part.numel(), of=self._span):
                numel = span.stop - span.start
                n_subtrees, n_blocks = -(-numel // _SUBTREE_NUMEL), -(-numel // BLOCK_NUMEL)
                numbers = torch.empty(n_blocks, dtype=torch.float64, device=self._device)
                kernels.subtrees_kernel[(-(-n_subtrees // 2),)](
                    part[span],
                    numel,
                    scales,
                    self._subtrees,
                    in_memory=in_memory,
                    levels=kernels.SUBTREE_LEVELS,
                    **kernels.TREE_OPTIONS,
                )
                kernels.trees_kernel[(n_blocks,)](
                    self._subtrees, n_subtrees, self._rows, levels=_TREE_LEVELS, **kernels.TREE_OPTIONS
                )
                kernels.numbers_kernel[(-(-n_blocks // _NUMBERS),)](
                    self._rows, numbers, n_blocks, block_numel=_NUMBERS, **kernels.TREE_OPTIONS
                )
                self._numbers.append(numbers)


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
