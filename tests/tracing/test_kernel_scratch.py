"""What kernels take of a device beside arguments and results, by the sources of torch and cudnn-frontend. `tests/gpu` measures it."""

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
FORWARD = aten._scaled_dot_product_flash_attention.default
TABLE = aten.embedding_dense_backward.default
SUM = aten.sum.dim_IntList
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


def test_attention_of_few_queries_is_split_by_keys() -> None:
    query = heads_of(1, 12, 1024, 64)  # 192 blocks of 64 queries, where a device runs 264 at once; four blocks of keys
    rows = 4 * 12 * 1024
    assert scratch_bytes(FORWARD, (query,) * 3) == cuda_block_bytes(4 * rows) + cuda_block_bytes(4 * rows * 64)
    assert scratch_bytes(FORWARD, (query, query, query, 0.1)) == 0  # not with dropout
    assert scratch_bytes(FORWARD, (heads_of(2, 12, 1024, 64),) * 3) == 0  # enough blocks
    assert scratch_bytes(FORWARD, (query, heads_of(1, 12, 256, 64), heads_of(1, 12, 256, 64))) == 0  # one block of keys
    assert scratch_bytes(FORWARD, (heads_of(0, 12, 1024, 64),) * 3) == 0
    # 132 blocks use the device as well in two parts as in more, and heads of 128 elements have twice as many blocks of keys.
    assert scratch_bytes(FORWARD, (heads_of(1, 4, 33 * 64, 128),) * 3) == cuda_block_bytes(
        4 * 2 * 4 * 33 * 64
    ) + cuda_block_bytes(4 * 2 * 4 * 33 * 64 * 128)


def lookups(count: int, width: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """A gradient [count, width] and the indices of its rows."""
    return torch.empty(count, width, dtype=dtype, device="meta"), torch.empty(count, dtype=torch.int64, device="meta")


def test_the_gradient_of_a_table_has_sums_of_each_row_that_is_looked_up() -> None:
    gradient, indices = lookups(16384, 4096)
    sums = cuda_block_bytes(4 * (1638 + 16384) * 4096)
    lists = 8 * (8 * 16384 + 2 * (1638 + 16384)) + 2 * 512
    assert sums + lists <= scratch_bytes(TABLE, (gradient, indices, 32000, -1, False)) <= sums + lists + 4 * 512
    # A table of few rows has no more of them.
    few = cuda_block_bytes(4 * (1638 + 1000) * 4096)
    assert few < scratch_bytes(TABLE, (gradient, indices, 1000, -1, False)) < few + 2 * MIB
    gradient, indices = lookups(3072, 4096)
    assert scratch_bytes(TABLE, (gradient, indices, 32000, -1, False)) == 0
    assert scratch_bytes(TABLE, (gradient, indices, 32000, -1, True)) > 4 * 3072 * 4096
    turned = gradient.t().contiguous().t()
    assert scratch_bytes(TABLE, (turned, indices, 32000, -1, False)) == cuda_block_bytes(turned.nbytes)


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype, device="meta")


def test_a_sum_over_rows_takes_as_much_as_fills_a_device() -> None:
    # 32 x 4 threads with four results each: 16 blocks of them on each of 132 multiprocessors, 32 blocks side by side, so 66 above one another.
    exchanged = 4 * 4096 * 66 * 32 * 4
    for dtype in (torch.bfloat16, torch.float32):
        assert scratch_bytes(SUM, (matrix(16384, 4096, dtype), [0])) == cuda_block_bytes(exchanged) + 512
    # Of 2048 rows each thread has 512, and blocks have at least sixteen: 32 blocks above one another.
    assert scratch_bytes(SUM, (matrix(2048, 4096), [0], True)) == cuda_block_bytes(exchanged // 66 * 32) + 512
    # Fewer than 256 for a thread: no exchange.
    assert scratch_bytes(SUM, (matrix(1020, 4096), [0])) == 0
    # More blocks side by side than fill the device.
    assert scratch_bytes(SUM, (matrix(2048, 4096 * 67), [0])) == 0
    # Results that lie in no fours.
    assert scratch_bytes(SUM, (matrix(16384, 4095), [0])) == cuda_block_bytes(4 * 4095 * 5 * 32) + 512
    # All of it, in three dimensions too.
    assert scratch_bytes(SUM, (matrix(16384, 4096).view(4, 4096, 4096), [0, 1])) == cuda_block_bytes(exchanged) + 512


def test_a_sum_along_rows_takes_little() -> None:
    assert scratch_bytes(SUM, (matrix(16384, 4096), [-1])) == 0
    # 512 threads with 2^14 values each: blocks that fill the device, or values of a thread by 256.
    assert scratch_bytes(aten.sum.default, (matrix(2048, 4096),)) == cuda_block_bytes(4 * 528) + 512
    assert scratch_bytes(aten.mean.default, (matrix(1 << 14, 1 << 14),)) == cuda_block_bytes(4 * 2048) + 512
    assert scratch_bytes(aten.linalg_vector_norm.default, (matrix(2048, 4096),)) == cuda_block_bytes(4 * 528) + 512
    assert scratch_bytes(aten.sum.default, (matrix(2048, 4096, torch.int64),)) == cuda_block_bytes(8 * 528) + 512
    # A variance has four numbers for each result, and the largest value one.
    assert scratch_bytes(aten.var.correction, (matrix(2048, 4096),)) == cuda_block_bytes(16 * 528) + 512
    assert scratch_bytes(aten.amax.default, (matrix(2048, 4096), [0, 1])) == cuda_block_bytes(4 * 528) + 512
    # Of the transposed view rows are columns.
    assert scratch_bytes(SUM, (matrix(4096, 16384).t(), [0])) == scratch_bytes(SUM, (matrix(4096, 16384), [1]))


def test_a_large_sum_in_16_bits_is_added_up_in_parts() -> None:
    rows = (1 << 15) + 8
    large, small = matrix(rows, 1 << 15), matrix(1 << 14, 1 << 15)  # more than 2 GiB, and 1 GiB
    assert scratch_bytes(SUM, (large, [1])) - scratch_bytes(SUM, (small, [1])) == cuda_block_bytes(4 * rows)
    assert scratch_bytes(SUM, (large.float(), [1])) == scratch_bytes(SUM, (small.float(), [1]))


def test_sums_of_nothing_and_of_one_take_nothing() -> None:
    assert scratch_bytes(SUM, (matrix(0, 4096), [0])) == 0
    assert scratch_bytes(aten.sum.default, (torch.empty((), device="meta"),)) == 0
    assert scratch_bytes(SUM, (matrix(1, 4096), [0])) == 0
    assert scratch_bytes(aten.amax.default, (matrix(1, 1), 0)) == 0


def test_norms_of_many_narrow_rows_add_up_some_at_a_time() -> None:
    values, weight = matrix(80000, 1024), torch.empty(1024, dtype=torch.bfloat16, device="meta")
    # 1024 blocks, and what adds these up: 256 for each thread, 16 blocks.
    each = (2 * 1024 * 1024 + 2048) + cuda_block_bytes(4 * 1024 * 16 * 32 * 4) + 512
    assert scratch_bytes(aten._fused_rms_norm_backward.default, (values, values, [1024], None, weight)) == each + MIB
    layer = aten.native_layer_norm_backward.default
    assert scratch_bytes(layer, (values, values, [1024], None, None, weight, weight)) == 2 * (each + MIB)
    assert scratch_bytes(layer, (values, values, [1024], None, None, None, None)) == 0
    few, wide = matrix(65536, 1024), matrix(80000, 4096)
    assert scratch_bytes(layer, (few, few, [1024], None, None, weight, weight)) == 0
    assert scratch_bytes(layer, (wide, wide, [4096], None, None, wide[0], wide[0])) == 0
    # What does not lie row by row is copied.
    turned = matrix(1024, 512).t()
    assert scratch_bytes(layer, (turned, few, [1024], None, None, weight, weight)) == turned.nbytes


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


def test_a_meter_sees_the_gradient_of_a_bias() -> None:
    inputs = torch.empty(16384, 1024, device="meta")
    layer = torch.nn.Linear(1024, 1024, device="meta")
    with LiveBytes(lambda _: False, on_device=True) as meter:
        out = layer(inputs)
        gradient = torch.empty_like(out)
        before = meter.restart_peak()
        out.backward(gradient)
    made = cuda_block_bytes(4 << 20) + 4096
    exchanged = 4 * 1024 * 256 * 32 * 4
    assert meter.peak - before == made + cuda_block_bytes(exchanged) + 512
