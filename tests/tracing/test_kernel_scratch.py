"""What kernels of attention take of a device beside arguments and results, by the sources of torch and cudnn-frontend. `tests/gpu` measures it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.tracing.kernel_scratch import scratch_bytes
from patrickstar.tracing.live_bytes import LiveBytes

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention_backward.default
CUDNN = aten._scaled_dot_product_cudnn_attention_backward.default
MIB = 1 << 20
SUMS = 4 * 4 * 512  # a number in fp32 for each row of four heads


def heads_of(
    batch: int, heads: int, length: int, width: int, dtype: torch.dtype = torch.bfloat16, *, contiguous: bool = False
) -> Tensor:
    """A tensor [batch, heads, length, width], as projections leave it or contiguous."""
    if contiguous:
        return torch.empty(batch, heads, length, width, dtype=dtype, device="meta")
    return torch.empty(batch, length, heads, width, dtype=dtype, device="meta").transpose(1, 2)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_flash_attention_accumulates_the_gradient_of_the_query_in_fp32() -> None:
    query = heads_of(2, 32, 1000, 80)
    sums, accumulated = 4 * 2 * 32 * 1024, 4 * 2 * 32 * 1024 * 96
    assert scratch_bytes(FLASH, (query,) * 5) == sums + accumulated + MIB
    wide = heads_of(1, 1, 128, 136)
    assert scratch_bytes(FLASH, (wide,) * 5) == 512 + 4 * 128 * 192


def test_keys_that_several_heads_share_have_a_gradient_for_each() -> None:
    query, key = heads_of(1, 32, 2048, 128), heads_of(1, 8, 2048, 128)
    alone = scratch_bytes(FLASH, (query,) * 5)
    assert scratch_bytes(FLASH, (query, query, key, key, query)) == alone + 2 * (2 * 32 * 2048 * 128 + MIB)


def test_gradients_that_lie_otherwise_are_copied() -> None:
    query, other = heads_of(1, 4, 512, 64), heads_of(1, 4, 512, 64, contiguous=True)
    alone = scratch_bytes(FLASH, (query,) * 5)
    assert scratch_bytes(FLASH, (other, query, query, query, query)) == alone + query.nbytes
    assert scratch_bytes(FLASH, (query, query, query, query, other)) == alone + query.nbytes
    one = heads_of(1, 1, 512, 64, contiguous=True)
    assert scratch_bytes(FLASH, (one,) * 5) == scratch_bytes(FLASH, (heads_of(1, 1, 512, 64),) * 5)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_flash_attention_accumulates_in_several_places() -> None:
    query = heads_of(1, 16, 256, 64)
    torch.use_deterministic_algorithms(False)
    alone = scratch_bytes(FLASH, (query,) * 5)
    torch.use_deterministic_algorithms(True)
    splits = 9  # of 132 multiprocessors, for 16 heads
    one = 4 * 16 * 256 * 64
    assert scratch_bytes(FLASH, (query,) * 5) - alone == cuda_block_bytes(splits * one) - cuda_block_bytes(one)
    assert scratch_bytes(FLASH, (heads_of(0, 16, 256, 64),) * 5) == 0
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert scratch_bytes(FLASH, (query,) * 5) == alone


@pytest.mark.parametrize(
    ("width", "dtype", "nbytes"),
    [
        (64, torch.bfloat16, SUMS + (4 * 4 * 512 * 129 + MIB)),
        (64, torch.float32, 2 * SUMS + 4 * 4 * 512 * 64 + (4 * 4 * 512 * 129 + MIB)),
        (
            256,
            torch.float16,
            2 * SUMS + 3 * (4 * 4 * 512 * 256 + MIB) + (4 * (2 * 200 * 128 * 256 + 4 * 512 * 257) + MIB),
        ),
    ],
    ids=["half", "float", "wide"],
)
def test_efficient_attention_takes_at_most_so_much(width: int, dtype: torch.dtype, nbytes: int) -> None:
    query = heads_of(1, 4, 512, width, dtype)
    assert scratch_bytes(EFFICIENT, (query, query, query, query, None, query)) == nbytes


def test_attention_of_cudnn_takes_one_block() -> None:
    query, key = heads_of(2, 32, 1000, 80), heads_of(2, 8, 500, 80)
    accumulated = 4 * 2 * 32 * 1000 * 80 + 4 * 2 * 32 * 1000 + 16
    assert scratch_bytes(CUDNN, (query,) * 6) == cuda_block_bytes(accumulated)
    # Keys and values that heads share have a gradient for each first.
    grouped = cuda_block_bytes(accumulated + 2 * 2 * 2 * 32 * 500 * 80)
    assert scratch_bytes(CUDNN, (query, query, key, key, query)) == grouped
    # A gradient that is of one number everywhere is copied.
    one = torch.empty((), dtype=torch.bfloat16, device="meta").expand(query.shape)
    assert scratch_bytes(CUDNN, (one, *(query,) * 4)) == cuda_block_bytes(accumulated) + cuda_block_bytes(query.nbytes)


def test_other_operations_take_nothing_that_is_known() -> None:
    assert scratch_bytes(aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2))) == 0
    assert scratch_bytes("no operation", ()) == 0


@pytest.mark.parametrize("on_device", [True, False])
def test_a_step_that_is_traced_on_the_host_has_the_scratch_of_a_device(on_device: bool) -> None:
    query, key, value = (torch.randn(1, 128, 4, 64).transpose(1, 2).requires_grad_() for _ in range(3))
    with LiveBytes(lambda _: False, on_device=on_device) as meter:
        out = F.scaled_dot_product_attention(query, key, value)
        gradient = torch.ones(1, 128, 4, 64).transpose(1, 2)
        meter.restart_peak()
        before = meter.live
        out.backward(gradient)
        made = 3 * query.nbytes
        scratch = 4 * 4 * 128 + 4 * 4 * 128 * 64
        assert meter.peak - before == made + (scratch if on_device else 0)
