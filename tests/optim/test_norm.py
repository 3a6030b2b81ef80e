"""The norm of gradients. What takes `make_norm` is the contract of every norm, which `tests/triton` imports."""

import math
from functools import reduce
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.optim import norm as norms
from patrickstar.optim.norm import BLOCK_NUMEL, GlobalNorm, clip_factor
from tests.optim.oracle import different, sum_of_squares


@pytest.fixture(scope="module")
def make_norm():
    return GlobalNorm


def added(norm, tensors, factors=()):
    for tensor in tensors:
        norm.add(tensor, factors)
        norm.end_tensor()
    return norm


def total(norm):
    """The sum of squares so far, in fp64."""
    return reduce(add, norm.numbers().tolist(), 0.0)


def result(norm):
    return norms.norm_of(norm.numbers().tolist())


def norm_of(tensors, norm=None):
    return result(added(norm or GlobalNorm(), [tensor.detach().reshape(-1) for tensor in tensors]))


def defined_sum(tensors, factors=()):
    """The definition, written out over whole tensors: the sum of squares, which shows differences that the norm in fp32 hides."""
    total = 0.0
    for tensor in tensors:
        flat = tensor.float().reshape(-1)
        for factor in factors:
            flat = flat * factor
        for start in range(0, flat.numel(), 65_536):
            total += sum_of_squares(flat[start : start + 65_536])
    return total


def gradients(*shapes, seed=1):
    """Over six decades, so that sums in another order mostly have other bits."""
    generator = torch.Generator().manual_seed(seed)
    normal = [torch.randn(shape, generator=generator) for shape in shapes]
    return [tensor * 10.0 ** (torch.rand(tensor.shape, generator=generator) * 6 - 3) for tensor in normal]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "numel", [1, 15, 16, 17, 33, 2_047, 2_048, 2_049, 50_021, 65_535, 65_536, 65_537, 4 * 65_536 + 1, 5 * 65_536]
)
def test_a_tensor_of_any_length_has_the_sum_of_its_blocks(numel, dtype, make_norm):
    (tensor,) = gradients((numel,), seed=numel)
    tensor = tensor.to(dtype)
    assert total(added(make_norm(), [tensor])) == defined_sum([tensor])


def test_the_norm_is_the_root_of_the_sum(make_norm):
    tensors = gradients((210_000,), (65_536,), (1,), (0,), (131_072,), (15,))
    norm = added(make_norm(), tensors)
    assert total(norm) == defined_sum(tensors)
    want = torch.tensor(math.sqrt(defined_sum(tensors)), dtype=torch.float64).float()
    assert different(result(norm), want) == 0


@pytest.mark.parametrize("factors", [(0.5,), (1 / 3, 0.7), (1e30, 1e-38)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_factors_multiply_in_fp32_first(factors, dtype, make_norm):
    tensors = [tensor.to(dtype) / 3 for tensor in gradients((100,), (BLOCK_NUMEL + 2_000,))]
    scales = [torch.tensor(factor) for factor in factors]
    got = total(added(make_norm(), tensors, scales))
    assert got == defined_sum(tensors, scales) != defined_sum(tensors)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_pieces_of_any_length_have_the_sum_of_whole_tensors(data, make_norm):
    tensors, factors = [tensor.bfloat16() for tensor in gradients((1_000,), (150_001,))], [torch.tensor(0.3)]
    near_blocks = st.sampled_from([BLOCK_NUMEL - 1, BLOCK_NUMEL, BLOCK_NUMEL + 1, 2 * BLOCK_NUMEL])
    pieces = make_norm()
    for tensor in tensors:
        cuts = data.draw(st.lists(near_blocks | st.integers(0, tensor.numel()), max_size=5).map(sorted))
        cuts = [min(cut, tensor.numel()) for cut in cuts]
        for start, stop in zip([0, *cuts], [*cuts, tensor.numel()], strict=True):
            pieces.add(tensor[start:stop], factors)
        pieces.end_tensor()
    assert total(pieces) == total(added(GlobalNorm(), tensors, factors))


def test_blocks_are_counted_from_the_start_of_each_tensor(make_norm):
    seen_apart, seen_together = [], []
    for seed in range(4):
        first, second = gradients((1000,), (BLOCK_NUMEL + 5000,), seed=seed)
        apart, together = added(make_norm(), [first, second]), make_norm()
        together.add(first)
        together.add(second)
        together.end_tensor()
        blocks = [first, second[:BLOCK_NUMEL], second[BLOCK_NUMEL:]]
        assert total(apart) == sum(map(sum_of_squares, blocks))
        seen_apart.append(total(apart))
        seen_together.append(total(together))
    assert seen_apart != seen_together, "a forgotten end_tensor() would not be seen"


def test_the_order_of_tensors_is_the_order_of_the_sum():
    seen = []
    for seed in range(8):
        tensors = gradients((10_000,), (20_000,), (3000,), (70_000,), seed=seed)
        seen.append([total(added(GlobalNorm(), order)) for order in (tensors, tensors[::-1])])
    assert any(forward != backward for forward, backward in seen)


def test_each_sum_has_its_place(make_norm):
    # Of tensors of this size every third or fourth has other bits in another order of additions; the larger, the fewer.
    tensors = gradients(*[(1000,)] * 40)
    sums = [total(added(make_norm(), [tensor])) for tensor in tensors]
    assert sums == [sum_of_squares(tensor) for tensor in tensors]
    assert sums != [float(tensor.double().square().sum()) for tensor in tensors]


def test_nothing_beyond_the_end_is_summed(make_norm):
    whole = torch.full((BLOCK_NUMEL + 100,), torch.nan)
    for numel in (1, 100, 2_051, BLOCK_NUMEL):
        assert total(added(make_norm(), [whole[40 : 40 + numel].fill_(2.0)])) == 4.0 * numel
        whole.fill_(torch.nan)


def test_what_one_tensor_has_left_is_none_of_the_next_ones(make_norm):
    norm = added(make_norm(), [torch.full((5_000,), 3.0), torch.full((1,), 2.0)])
    assert total(norm) == 45_004.0
    norm.add(torch.ones(3))
    with pytest.raises(AssertionError, match="end_tensor"):
        norm.numbers()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows_wherever_it_is(value, make_norm):
    for place in (0, 7, 65_535, 65_536, 70_001):
        tensor = torch.zeros(70_002)
        tensor[place] = value
        assert different(norm_of([tensor], make_norm()), torch.tensor(value)) == 0


def test_without_gradients_the_norm_is_zero(make_norm):
    assert different(result(make_norm()), torch.tensor(0.0)) == 0
    assert different(norm_of([torch.zeros(3), torch.zeros(0)], make_norm()), torch.tensor(0.0)) == 0


def test_a_strided_gradient_counts_in_the_order_of_its_indices():
    (gradient,) = gradients((300, 400))
    strided = gradient.T.contiguous().T
    assert strided.stride() == (1, 300)
    assert different(norm_of([strided]), norm_of([gradient])) == 0


def test_squares_beyond_fp32_do_not_overflow():
    assert norm_of([torch.full((4,), 1e30)]) == torch.tensor(2e30)
    assert norm_of([torch.full((4,), 1e-30)]) == torch.tensor(2e-30)
    assert norm_of([torch.full((100,), 3e38)]) == math.inf  # the norm itself is beyond fp32


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_gradients_have_the_norm_and_the_factor_of_torch(value):
    parameter = torch.nn.Parameter(torch.zeros(5))
    parameter.grad = torch.tensor([1.0, value, 2.0, 0.0, -3.0])
    norm = norm_of([parameter.grad])
    clipped = parameter.grad * clip_factor(1.0, norm)
    assert different(norm, torch.nn.utils.clip_grad_norm_([parameter], 1.0)) == 0
    assert different(clipped, parameter.grad) == 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(max_norm=st.floats(0, 1e6), norm=st.floats(0, 1e6, width=32))
def test_the_clip_factor_is_that_of_torch(max_norm, norm):
    parameter = torch.nn.Parameter(torch.zeros(64))
    parameter.grad = torch.randn(64, generator=torch.Generator().manual_seed(2))
    factor = clip_factor(max_norm, torch.tensor(norm, dtype=torch.float32))
    clipped = parameter.grad * factor
    torch.nn.utils.clip_grads_with_norm_([parameter], max_norm, torch.tensor(norm, dtype=torch.float32))
    assert different(clipped, parameter.grad) == 0
    assert factor.dtype is torch.float32
    assert factor.shape == ()


def test_gradients_are_left_as_they_are_and_no_graph_is_kept():
    gradient = torch.ones(70_000, requires_grad=True)
    norm = norm_of([gradient, gradient * 2])
    assert not norm.requires_grad
    assert bool((gradient == 1).all())


def test_no_number_of_threads_changes_the_sum():
    (tensor,) = gradients((3 * 65_536 + 77,))
    sums = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)  # one again for the next test
        sums.add(total(added(GlobalNorm(), [tensor])))
    assert len(sums) == 1
