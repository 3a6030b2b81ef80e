"""Passes over planes: all that a step does to every element where it lies, by one family of kernels for each type of device.

Families differ in speed, never in a bit; `choose_kernels` decides which is used.

NaN: what is NaN in one family is NaN in the other. Which one is defined where parts of a master are written (`masters.py`), and nowhere else: a GPU
makes 0x7FFFFFFF of all in fp32, and processors differ too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.optim import masters, reference
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.masters import Scratch
from patrickstar.optim.norm import GlobalNorm
from patrickstar.optim.reference import Kernel


@dataclass(frozen=True, slots=True)
class PassBytes:
    """The most bytes that passes take of the device where they run, beside what they are given: for the update of a chunk, and for a norm."""

    update: int = 0
    norm: int = 0


@dataclass(frozen=True, slots=True)
class Passes:
    """Passes over planes that lie on one device, in torch's operations on any. None waits for it. All tensors are flat and contiguous, of any
    length, at any address.

    `kernel`: updates whole fp32 planes; the other formats block by block.
    """

    kernel: Kernel = reference.update
    _splitting: Scratch = field(init=False, default_factory=partial(Scratch, torch.float32, torch.float32, torch.int32))
    _widening: Scratch = field(init=False, default_factory=partial(Scratch, torch.float32))

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
        """Updates weight, rest, exp_avg and exp_avg_sq in place, as `reference.py` defines it; the gradient stays as it is.

        Args:
            weight, rest: fp32 and None, or the parts of a split master (`masters.py`). exp_avg, exp_avg_sq: fp32.
            grad: fp32, bf16 or fp16, widened before anything else. All of one length and on one device.
            step: the number of this update for these elements, counting from 1.
            factors: what the widened gradient is multiplied with first, in order, each product rounded (0-dim fp32, on this device or on the host).
        """
        if rest is None and grad.dtype is torch.float32 and not factors:
            self.kernel(weight, grad, exp_avg, exp_avg_sq, step=step, hyper=hyper)
            return
        numel = masters.block_numel(weight.numel(), most=masters.BLOCK_NUMEL)
        if weight.is_cpu:  # for each of torch's threads as many as it takes, or one would do nearly all
            numel = max(masters.BLOCK_NUMEL, torch.get_num_threads() * masters.GRAIN_NUMEL)
        # Nothing as large as a chunk is made: a block is widened, updated by the kernel for fp32, and narrowed again.
        scratch = (self._widening if rest is None else self._splitting).blocks(weight.device, numel)
        for span in masters.blocks(weight.numel(), of=numel):
            gradient, *joined = (block[: span.stop - span.start] for block in scratch)
            gradient.copy_(grad[span])
            for factor in factors:
                gradient.mul_(factor)
            if rest is None:
                self.kernel(weight[span], gradient, exp_avg[span], exp_avg_sq[span], step=step, hyper=hyper)
                continue
            master, bits = joined
            masters.join(weight[span], rest[span], master, scratch=bits)
            self.kernel(master, gradient, exp_avg[span], exp_avg_sq[span], step=step, hyper=hyper)
            masters.split(master, weight[span], rest[span], scratch=bits)

    def update_all(self, planes: Sequence[tuple[Tensor, ...]], *, step: int, hyper: Hyper) -> None:
        """Updates many tensors alike, each as (weight, gradient, exp_avg, exp_avg_sq) in fp32: in one call where torch's kernel takes them all."""
        if self.kernel is reference.update_fused:
            reference.update_all_fused(planes, step=step, hyper=hyper)
            return
        for weight, gradient, exp_avg, exp_avg_sq in planes:
            self.update(weight, None, gradient, exp_avg, exp_avg_sq, step=step, hyper=hyper)

    def put(self, target: Tensor, source: Tensor, *, adds: bool, is_finite: Tensor | None = None) -> None:
        """Writes the source over the target, or adds it to what is there: in fp32, rounded to the target's type to nearest, ties to even.

        `is_finite`: a flag with which the target is then looked at, as `look` does.
        """
        if adds:
            target.add_(source)
        else:
            target.copy_(source)
        if is_finite is not None:
            self.look(target, is_finite)  # now, where it is in the caches

    def look(self, piece: Tensor, is_finite: Tensor) -> None:
        """Makes a flag (0-dim, int32, where the piece is) 0 if there is an Inf or NaN in the piece; else leaves it as it is."""
        if piece.numel():
            least, most = torch.aminmax(piece)  # both show in the extremes
            is_finite.mul_(torch.isfinite(least) & torch.isfinite(most))

    def norm(self, device: torch.device | None, *, largest: int | None = None) -> GlobalNorm:
        """An empty global norm, whose squares are taken on this device; None: on the host. `largest`: elements of the largest tensor, if known."""
        return GlobalNorm(device, largest=largest)

    def scratch_bytes(self, numel: int, *, is_split: bool, largest: int, tensors: int) -> PassBytes:
        """The most bytes that an update of so many elements takes of a device, and a norm of so many tensors, the largest of so many elements."""
        block = masters.block_numel(numel, most=masters.BLOCK_NUMEL)
        widened = cuda_block_bytes(4 * block)
        whole, of_block = map(reference.scratch_bytes, (numel, block))
        # Masters are joined and split in blocks of three types, and splitting looks for NaN.
        update = 3 * widened + max(of_block, 4 * widened) if is_split else max(whole, widened + of_block)
        return PassBytes(update, GlobalNorm.scratch_bytes(largest, tensors))


def triton_bytes(largest: int, tensors: int) -> PassBytes:
    """Bytes of Triton's passes, known without triton. A norm collects a block of 65,536 elements, and one launch sums 256 of them at most.

    `largest`: elements of the largest tensor, of so many.
    """
    blocks = max(1, -(-largest // 65_536))
    span = min(256, blocks)
    numbers = tensors * (2 + blocks // 256) * cuda_block_bytes(1)
    return PassBytes(norm=4 * 65_536 + cuda_block_bytes(span * 4_096) + cuda_block_bytes(span * 128) + 2 * numbers)
