"""Masters that are split and joined, and nothing else, by the functions that the update uses: so that each value can be looked at."""

from __future__ import annotations

import triton
import triton.language as tl

from patrickstar.optim.triton_kernels import joined, parted


@triton.jit
def join_kernel(weight, rest, master, numel, block_numel: tl.constexpr):
    offsets = tl.program_id(0) * block_numel + tl.arange(0, block_numel)
    mask = offsets < numel
    shown = tl.load(weight + offsets, mask=mask, other=0.0)
    tl.store(master + offsets, joined(shown, tl.load(rest + offsets, mask=mask, other=0)), mask=mask)


@triton.jit
def split_kernel(master, weight, rest, numel, block_numel: tl.constexpr):
    offsets = tl.program_id(0) * block_numel + tl.arange(0, block_numel)
    mask = offsets < numel
    shown, left = parted(tl.load(master + offsets, mask=mask, other=0.0), weight.dtype.element_ty)
    tl.store(weight + offsets, shown, mask=mask)
    tl.store(rest + offsets, left, mask=mask)
