import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.optim.norm import BLOCK_NUMEL, GlobalNorm, clip_factor
from tests.optim.oracle import different, sum_of_squares


def norm_of(tensors):
    norm = GlobalNorm()
    for tensor in tensors:
        norm.add_tensor(tensor)
    return norm.result()


def defined_sum(tensors):
    """The definition, written out over whole tensors."""
    total = 0.0
    for tensor in tensors:
        flat = tensor.reshape(-1)
        for start in range(0, flat.numel(), 65_536):
            total += sum_of_squares(flat[start : start + 65_536])
    return total


def defined_norm(tensors):
    return torch.tensor(math.sqrt(defined_sum(tensors)), dtype=torch.float64).float()


def gradients(*shapes, seed=1):
    """Over six decades, so that sums in another order mostly have other bits."""
    generator = torch.Generator().manual_seed(seed)
    normal = [torch.randn(shape, generator=generator) for shape in shapes]
    return [tensor * 10.0 ** (torch.rand(tensor.shape, generator=generator) * 6 - 3) for tensor in normal]


def sum_of_norm(norm):
    """The sum of squares before root and rounding: shows differences that fp32 hides."""
    return norm.sum_of_squares()


def test_the_norm_is_the_definition():
    tensors = gradients((300, 700), (65_536,), (1,), (0,), (2, 65_536), (5, 3))
    norm = GlobalNorm()
    for tensor in tensors:
        norm.add_tensor(tensor)
    assert sum_of_norm(norm) == defined_sum(tensors)
    assert different(norm_of(tensors), defined_norm(tensors)) == 0
    assert norm_of(tensors).dtype is torch.float32
    assert norm_of(tensors).shape == ()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_pieces_of_any_length_have_the_sum_of_whole_tensors(data):
    tensors = gradients((70_000,), (131_072,), (999,))
    whole, pieces = GlobalNorm(), GlobalNorm()
    for tensor in tensors:
        whole.add_tensor(tensor)
        cuts = data.draw(st.lists(st.integers(0, tensor.numel()), max_size=6).map(sorted))
        for start, stop in zip([0, *cuts], [*cuts, tensor.numel()], strict=True):
            pieces.add(tensor[start:stop])
        pieces.end_tensor()
    assert sum_of_norm(pieces) == sum_of_norm(whole)
    assert different(pieces.result(), whole.result()) == 0


def test_blocks_are_counted_from_the_start_of_each_tensor():
    seen_apart, seen_together = [], []
    for seed in range(4):
        first, second = gradients((1000,), (BLOCK_NUMEL + 5000,), seed=seed)
        apart, together = GlobalNorm(), GlobalNorm()
        apart.add_tensor(first)
        apart.add_tensor(second)
        together.add(first)
        together.add(second)
        together.end_tensor()
        blocks = [first, second[:BLOCK_NUMEL], second[BLOCK_NUMEL:]]
        assert sum_of_norm(apart) == sum(map(sum_of_squares, blocks))
        seen_apart.append(sum_of_norm(apart))
        seen_together.append(sum_of_norm(together))
    assert seen_apart != seen_together, "a forgotten end_tensor() would not be seen"


def test_the_order_of_tensors_is_the_order_of_the_sum():
    seen_forward, seen_backward = [], []
    for seed in range(8):
        tensors = gradients((10_000,), (20_000,), (3000,), (70_000,), seed=seed)
        forward, backward = GlobalNorm(), GlobalNorm()
        for tensor in tensors:
            forward.add_tensor(tensor)
        for tensor in reversed(tensors):
            backward.add_tensor(tensor)
        assert forward.result().item() == pytest.approx(backward.result().item(), rel=1e-6)
        seen_forward.append(sum_of_norm(forward))
        seen_backward.append(sum_of_norm(backward))
    assert seen_forward != seen_backward


def test_a_strided_gradient_counts_in_the_order_of_its_indices():
    (gradient,) = gradients((300, 400))
    strided = gradient.T.contiguous().T
    assert strided.stride() == (1, 300)
    assert different(norm_of([strided]), norm_of([gradient])) == 0


def test_squares_beyond_fp32_do_not_overflow():
    assert norm_of([torch.full((4,), 1e30)]) == torch.tensor(2e30)
    assert norm_of([torch.full((4,), 1e-30)]) == torch.tensor(2e-30)
    assert norm_of([torch.full((100,), 3e38)]) == math.inf  # the norm itself is beyond fp32


def test_without_gradients_the_norm_is_zero():
    assert different(GlobalNorm().result(), torch.tensor(0.0)) == 0
    assert different(norm_of([torch.zeros(3), torch.zeros(0)]), torch.tensor(0.0)) == 0


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


def test_a_piece_in_the_middle_of_a_tensor_is_no_result():
    norm = GlobalNorm()
    norm.add(torch.ones(3))
    with pytest.raises(AssertionError, match="end_tensor"):
        norm.result()


def test_gradients_are_left_as_they_are_and_no_graph_is_kept():
    gradient = torch.ones(70_000, requires_grad=True)
    norm = norm_of([gradient, gradient * 2])
    assert not norm.requires_grad
    assert bool((gradient == 1).all())


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 31, 32, 33, 4095, 65_535, 65_537, 4 * 65_536 + 1, 5 * 65_536])
def test_a_tensor_of_any_length_has_the_sum_of_its_blocks(numel):
    (tensor,) = gradients((numel,), seed=numel)
    norm = GlobalNorm()
    norm.add_tensor(tensor)
    assert sum_of_norm(norm) == defined_sum([tensor])


def test_each_sum_has_its_place():
    # Of tensors of this size every third or fourth has other bits in another order of additions; the larger, the fewer.
    tensors = gradients(*[(1000,)] * 40)
    sums = []
    for tensor in tensors:
        norm = GlobalNorm()
        norm.add_tensor(tensor)
        sums.append(sum_of_norm(norm))
    assert sums == [sum_of_squares(tensor) for tensor in tensors]
    assert sums != [float(tensor.double().square().sum()) for tensor in tensors]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows_wherever_it_is(value):
    for place in (0, 7, 65_535, 65_536, 70_001):
        tensor = torch.zeros(70_002)
        tensor[place] = value
        assert math.isnan(value) == math.isnan(norm_of([tensor]).item())
        assert not math.isfinite(norm_of([tensor]).item())


def test_no_number_of_threads_changes_the_sum():
    (tensor,) = gradients((3 * 65_536 + 77,))
    before, sums = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            norm = GlobalNorm()
            norm.add_tensor(tensor)
            sums.add(sum_of_norm(norm))
    finally:
        torch.set_num_threads(before)
    assert len(sums) == 1
