"""The contract of norms for Triton's kernels: the sum of squares, to the last bit of fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from patrickstar.optim import triton_passes
from patrickstar.optim.norm import BLOCK_NUMEL, GlobalNorm
from patrickstar.optim.triton_passes import TritonNorm
from tests.optim.test_norm import (  # noqa: F401
    added,
    defined_sum,
    gradients,
    test_a_tensor_of_any_length_has_the_sum_of_its_blocks,
    test_blocks_are_counted_from_the_start_of_each_tensor,
    test_each_sum_has_its_place,
    test_factors_multiply_in_fp32_first,
    test_nothing_beyond_the_end_is_summed,
    test_pieces_of_any_length_have_the_sum_of_whole_tensors,
    test_the_norm_is_the_root_of_the_sum,
    test_what_is_not_finite_shows_wherever_it_is,
    test_what_one_tensor_has_left_is_none_of_the_next_ones,
    test_without_gradients_the_norm_is_zero,
    total,
)


@pytest.fixture(scope="module")
def make_norm() -> Callable[[], GlobalNorm]:
    return lambda: TritonNorm(torch.device("cpu"))


def test_a_long_tensor_is_summed_by_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_passes, "_SPAN_NUMEL", BLOCK_NUMEL)
    tensors = gradients((3 * BLOCK_NUMEL + 100,))
    assert total(added(TritonNorm(torch.device("cpu")), tensors)) == defined_sum(tensors)
