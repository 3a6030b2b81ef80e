"""Strides are those of torch, where tensors are dense; else contiguous."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.strides import contiguous_strides, dense_strides

shapes = st.lists(st.integers(0, 4), max_size=4)


@given(shape=shapes)
def test_contiguous_is_what_torch_makes(shape: list[int]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()


@given(data=st.data(), shape=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_dense_tensor_keeps_its_strides_in_any_order_of_dims(data: st.DataObject, shape: list[int]) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.empty([shape[dim] for dim in order]).permute(*torch.argsort(torch.tensor(order)).tolist())
    assert dense_strides(tensor.shape, tensor.stride()) == tensor.stride()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(4, 6)[:, ::2],
        torch.empty(4, 2)[:, 1],
        torch.empty(3).expand(2, 3),
        torch.empty(8).as_strided((2, 3), (2, 1)),
    ],
    ids=["every other column", "a column", "expanded", "overlapping"],
)
def test_gaps_and_overlaps_make_it_contiguous(tensor: torch.Tensor) -> None:
    assert dense_strides(tensor.shape, tensor.stride()) == contiguous_strides(tensor.shape) != tensor.stride()
