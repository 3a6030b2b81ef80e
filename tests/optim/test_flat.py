import pytest
import torch

from patrickstar.core.strides import dense_strides
from patrickstar.optim.flat import flat_or_copy, put_back

TENSORS = {
    "contiguous": lambda: torch.arange(24.0).view(2, 3, 4),
    "channels last": lambda: torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.arange(12.0).view(3, 4).T,
    "a slice with an offset": lambda: torch.arange(24.0).view(6, 4)[2:5],
    "one element wide": lambda: torch.arange(4.0).view(4, 1, 1),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.zeros(3, 0, 2),
}
HOLES = {
    "every other column": lambda: torch.arange(24.0).view(4, 6)[:, ::2],
    "a column": lambda: torch.arange(8.0).view(4, 2)[:, 1],
}


@pytest.mark.parametrize("build", TENSORS.values(), ids=TENSORS)
def test_a_dense_tensor_is_viewed_without_a_copy(build):
    tensor = build()
    flat = flat_or_copy(tensor, dense_strides(tensor.shape, tensor.stride()))
    assert flat.shape == (tensor.numel(),)
    assert flat.is_contiguous()
    assert flat.data_ptr() == tensor.data_ptr()
    assert sorted(flat.tolist()) == sorted(tensor.flatten().tolist())
    flat += 1  # reaches every element of the tensor once
    assert torch.equal(tensor, build() + 1)


@pytest.mark.parametrize("build", HOLES.values(), ids=HOLES)
def test_a_tensor_with_holes_is_copied_and_put_back(build):
    tensor = build()
    stride = dense_strides(tensor.shape, tensor.stride())
    flat = flat_or_copy(tensor, stride)
    assert flat.tolist() == tensor.flatten().tolist()
    flat += 1
    assert torch.equal(tensor, build())
    put_back(flat, tensor, stride)
    assert torch.equal(tensor, build() + 1)


def test_tensors_of_other_strides_meet_in_one_order():
    weight = TENSORS["channels last"]()
    stride = dense_strides(weight.shape, weight.stride())
    assert stride == weight.stride() != weight.contiguous().stride()
    gradient = weight.contiguous() * 10
    assert torch.equal(flat_or_copy(gradient, stride), flat_or_copy(weight, stride) * 10)
    moment = torch.zeros_like(gradient)
    put_back(flat_or_copy(gradient, stride), moment, stride)
    assert torch.equal(moment, gradient)


def test_an_update_through_a_flat_view_is_seen_by_the_version_counter():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    before = weight._version
    flat_or_copy(weight, dense_strides(weight.shape, weight.stride())).mul_(2)
    assert weight._version > before
