"""Updates of fp32 masters from 16-bit gradients, whole or in two parts: the plain update of the widened gradient, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from patrickstar.optim.hyper import Hyper
from patrickstar.optim.masters import BLOCK_NUMEL, join, rest_type, scaled_blocks, split

HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
KEPT = (torch.bfloat16, torch.float16)
SIZES = (1, 7, BLOCK_NUMEL, BLOCK_NUMEL + 1, 3 * BLOCK_NUMEL - 5)


def parts(master: Tensor, kept: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    weight, rest = torch.empty(master.shape, dtype=kept), torch.empty(master.shape, dtype=rest_type(kept))
    split(master, weight, rest)
    return weight, rest


def joined(weight: Tensor, rest: Tensor) -> Tensor:
    master = torch.empty(weight.shape)
    join(weight, rest, master)
    return master


def of_bits(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())


def every_upper_half(low: int) -> Tensor:
    """All sign, exponent and upper mantissa bits over some lower half."""
    return of_bits((np.arange(1 << 16, dtype=np.uint64) << 16) | low)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234])
def test_joining_is_the_inverse_of_splitting(low: int, kept: torch.dtype) -> None:
    master = every_upper_half(low)
    weight, rest = parts(master, kept)
    again = joined(weight, rest)
    finite = ~torch.isnan(master)
    assert torch.equal(again[finite].view(torch.int32), master[finite].view(torch.int32))
    assert torch.isnan(again[~finite]).all()
    assert torch.isnan(weight[~finite]).all(), "a master that is NaN shows as one"
    assert torch.equal(torch.signbit(again), torch.signbit(master))
    assert bool((rest[~finite] == 0).all())
    last = parts(master[:-1], kept)[1]  # another length: torch widens the last elements by themselves
    assert torch.equal(last, rest[:-1])


def nearest_bf16(value: np.float32) -> float:
    """By trying both neighbours: the nearer one, of two equally near the one further from zero."""
    bits = int(np.float32(abs(value)).view(np.uint32))
    below = np.uint32(bits & 0xFFFF0000).view(np.float32)
    above = np.uint32((bits & 0xFFFF0000) + 0x10000).view(np.float32)
    # Beyond the largest bf16 the next one would be 2^128: infinity stands for it.
    upper = 2.0**128 if np.isinf(above) else float(above)
    found = above if float(abs(value)) - float(below) >= upper - float(abs(value)) else below
    return float(np.copysign(found, value))


@given(bits=st.integers(0, 0x7F7FFFFF), negative=st.booleans())
def test_the_weight_is_the_nearest_and_ties_go_away_from_zero(bits: int, negative: bool) -> None:
    value = np.uint32(bits | (0x80000000 if negative else 0)).view(np.float32)
    weight, _ = parts(torch.tensor([float(value)]))
    assert weight.item() == nearest_bf16(value) or (weight.item() == 0 == nearest_bf16(value))


def test_ties_go_away_from_zero() -> None:
    tie = of_bits(np.array([0x3F808000, 0xBF808000, 0x3F818000]))
    weight, rest = parts(tie)
    assert weight.tolist() == [1.0078125, -1.0078125, 1.015625]
    assert rest.tolist() == [-32768, -32768, -32768]


@pytest.mark.parametrize("low", [0, 0x0FFF, 0x1000, 0x1001, 0x3000, 0xE7FF])
def test_an_fp16_weight_is_torchs_rounding_of_the_master(low: int) -> None:
    """To nearest, ties to even, down to the smallest subnormal fp16 and up to infinity: which NumPy rounds by itself."""
    master = every_upper_half(low)
    weight, _ = parts(master, torch.float16)
    is_number = ~torch.isnan(master)
    with np.errstate(over="ignore"):
        want = torch.from_numpy(master.numpy().astype(np.float16))
    assert torch.equal(weight[is_number].view(torch.int16), want[is_number].view(torch.int16))
    assert torch.equal(weight[is_number].view(torch.int16), master.half()[is_number].view(torch.int16))


@pytest.mark.parametrize("kept", KEPT)
def test_a_weight_alone_is_its_own_master(kept: torch.dtype) -> None:
    """What has no rest yet, or was changed by hand, has a rest of zero."""
    weight = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(kept)
    master = joined(weight, torch.zeros(weight.shape, dtype=rest_type(kept)))
    assert torch.equal(master.isnan(), weight.isnan())
    assert torch.equal(master.nan_to_num(0.0), weight.float().nan_to_num(0.0))


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
