"""Updates of fp32 masters from 16-bit gradients: the plain update of the widened gradient, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.optim.hyper import Hyper
from patrickstar.optim.reference import Reference
from patrickstar.optim.widen import BLOCK_NUMEL, WideningKernel, scaled_blocks

HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
SIZES = (1, 7, BLOCK_NUMEL, BLOCK_NUMEL + 1, 3 * BLOCK_NUMEL - 5)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factors", [(), (0.5,), (1 / 3, 0.7)])
def test_the_update_is_that_of_the_widened_gradient(numel: int, dtype: torch.dtype, factors: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(numel)
    planes = torch.randn(3, numel, generator=generator)
    planes[2].abs_()
    grad = torch.randn(numel, generator=generator).to(dtype)
    ours, want = planes.clone(), planes.clone()
    multiplied = tuple(torch.tensor(factor) for factor in factors)
    WideningKernel(Reference()).update(ours[0], grad, ours[1], ours[2], step=2, hyper=HYPER, factors=multiplied)
    wide = grad.float().clone()
    for factor in multiplied:
        wide = wide * factor
    Reference().update(want[0], wide, want[1], want[2], step=2, hyper=HYPER)
    assert torch.equal(ours.view(torch.int32), want.view(torch.int32))


@given(st.sampled_from(SIZES), st.lists(st.floats(2**-10, 2.0, width=32), max_size=3))
def test_scaled_blocks_are_the_product_in_fp32(numel: int, factors: list[float]) -> None:
    piece = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).half()
    before, want = piece.clone(), piece.float()
    for factor in factors:
        want = want * torch.tensor(factor)
    blocks = list(scaled_blocks(piece, [torch.tensor(factor) for factor in factors]))
    assert torch.equal(torch.cat([block.float() for block in blocks]), want)
    assert torch.equal(piece, before)
    assert not factors or max(block.numel() for block in blocks) <= BLOCK_NUMEL
