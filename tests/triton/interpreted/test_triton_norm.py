"""The norm by Triton's kernels: the sum of squares of `GlobalNorm`, to the last bit of fp64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from patrickstar.optim import triton_norm
from patrickstar.optim.norm import BLOCK_NUMEL, GlobalNorm
from patrickstar.optim.triton_norm import TritonNorm
from tests.optim.oracle import sum_of_squares
from tests.triton.interpreted.planes import differing

HOST = torch.device("cpu")
SUBTREE = 2_048
SIZES = (
    1,
    15,
    16,
    17,
    SUBTREE - 1,
    SUBTREE,
    SUBTREE + 1,
    50_021,
    BLOCK_NUMEL - 1,
    BLOCK_NUMEL,
    BLOCK_NUMEL + 1,
    200_003,
)


def gradient(numel: int, *, seed: int = 1) -> Tensor:
    """Over two decades: where a few numbers are all of a sum, its order does not show."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * 10.0 ** (torch.rand(numel, generator=generator) * 2 - 1)


def sums(tensors: Sequence[Tensor], factors: Sequence[Tensor] = ()) -> tuple[float, float]:
    """The sum of squares by Triton, and by the definition."""
    ours, definition = TritonNorm(HOST), GlobalNorm()
    for tensor in tensors:
        for norm in (ours, definition):
            norm.add(tensor, factors)
            norm.end_tensor()
    assert differing(ours.result(), definition.result()) == 0
    return ours.sum_of_squares(), definition.sum_of_squares()


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_of_any_length_has_the_sum_of_the_tree(numel: int, dtype: torch.dtype) -> None:
    got, want = sums([gradient(numel).to(dtype)])
    assert got == want


def test_each_sum_has_its_place() -> None:
    tensors = [gradient(numel, seed=numel) for numel in (*range(1_000, 1_020), BLOCK_NUMEL)]
    found = []
    for tensor in tensors:
        norm = TritonNorm(HOST)
        norm.add_tensor(tensor)
        found.append(norm.sum_of_squares())
    assert found == [sum_of_squares(tensor) for tensor in tensors]
    assert found != [float(tensor.double().square().sum()) for tensor in tensors], "another order would not be seen"


def test_several_tensors_are_summed_left_to_right() -> None:
    got, want = sums([gradient(numel, seed=numel) for numel in (1_000, BLOCK_NUMEL + 5, 1, 131_072, 3)])
    assert got == want


@pytest.mark.parametrize("factors", [(0.5,), (1 / 3, 0.7), (1e30, 1e-38)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_multiply_in_fp32_first(factors: tuple[float, ...], dtype: torch.dtype) -> None:
    tensors = [gradient(numel).to(dtype) for numel in (100, BLOCK_NUMEL + 2_000)]
    got, want = sums(tensors, [torch.tensor(factor) for factor in factors])
    assert got == want != sums(tensors)[1]


@settings(max_examples=6)
@given(data=st.data())
def test_pieces_of_any_length_have_the_sum_of_the_whole(data: st.DataObject) -> None:
    ours, definition = TritonNorm(HOST), GlobalNorm()
    factors = [torch.tensor(0.3)]
    for numel in (1_000, 150_001):
        tensor = gradient(numel, seed=numel).bfloat16()
        definition.add(tensor, factors)
        definition.end_tensor()
        near_blocks = st.sampled_from([BLOCK_NUMEL - 1, BLOCK_NUMEL, BLOCK_NUMEL + 1, 2 * BLOCK_NUMEL])
        cuts = data.draw(st.lists(near_blocks | st.integers(0, numel), max_size=5).map(sorted))
        cuts = [min(cut, numel) for cut in cuts]
        for start, stop in zip([0, *cuts], [*cuts, numel]):
            ours.add(tensor[start:stop], factors)
        ours.end_tensor()
    assert ours.sum_of_squares() == definition.sum_of_squares()


def test_what_no_kernel_reads_is_collected_block_by_block() -> None:
    tensor = gradient(BLOCK_NUMEL + 70).double() / 3  # rounded to fp32 where it is collected
    ours, want = TritonNorm(HOST), GlobalNorm()
    ours.add(tensor, [torch.tensor(0.3)])
    ours.end_tensor()
    want.add(tensor.float(), [torch.tensor(0.3)])
    want.end_tensor()
    assert ours.sum_of_squares() == want.sum_of_squares()


def test_a_long_tensor_is_summed_by_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_norm, "_SPAN_NUMEL", BLOCK_NUMEL)
    got, want = sums([gradient(3 * BLOCK_NUMEL + 100)])
    assert got == want


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 7, BLOCK_NUMEL - 1, BLOCK_NUMEL, BLOCK_NUMEL + 4_999])
def test_what_is_not_finite_shows_wherever_it_is(bad: float, place: int) -> None:
    tensor = torch.zeros(BLOCK_NUMEL + 5_000)
    tensor[place] = bad
    ours, definition = TritonNorm(HOST), GlobalNorm()
    for norm in (ours, definition):
        norm.add_tensor(tensor)
    assert differing(ours.result(), definition.result()) == 0
    assert not torch.isfinite(ours.result())


def test_nothing_beyond_the_end_is_summed() -> None:
    whole = torch.full((BLOCK_NUMEL + 100,), torch.nan)
    for numel in (1, 100, SUBTREE + 3, BLOCK_NUMEL):
        norm = TritonNorm(HOST)
        norm.add(whole[40 : 40 + numel].fill_(2.0))
        norm.end_tensor()
        assert norm.sum_of_squares() == 4.0 * numel
        whole.fill_(torch.nan)


def test_what_one_tensor_has_left_is_none_of_the_next_ones() -> None:
    norm = TritonNorm(HOST)
    norm.add_tensor(torch.full((5_000,), 3.0))
    norm.add_tensor(torch.full((1,), 2.0))
    assert norm.sum_of_squares() == 45_004.0
    norm.add(torch.ones(3))
    with pytest.raises(AssertionError, match="end_tensor"):
        norm.result()


def test_without_gradients_the_norm_is_zero() -> None:
    norm = TritonNorm(HOST)
    norm.add_tensor(torch.zeros(0))
    assert differing(norm.result(), torch.tensor(0.0)) == 0
