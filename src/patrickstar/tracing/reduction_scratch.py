"""Scratch of reductions (sums, means, norms, largest values, the gradients of a norm's weights): what blocks of threads exchange that work on the
same results.

By `setReduceConfig` and `ReduceConfig::global_memory_size` of ATen/native/cuda/Reduce.cuh. It is more than one would think: a sum over the rows of
a matrix, as the gradient of a bias or of a norm's weight is, takes up to 132 MiB of an H100, whatever the size of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.tracing.multiprocessors import count_multiprocessors

__all__ = ["REDUCTION_RULES"]

_THREADS_OF_A_BLOCK: Final = 512
_THREADS_AT_ONCE: Final = 2048  # of a multiprocessor, at most
_WARP: Final = 32
_FEWEST, _MOST = 16, 256  # values of a thread
_SEMAPHORE: Final = 4  # bytes
_LARGEST_OFFSET: Final = (1 << 31) - 1  # bytes: larger inputs are reduced in parts
_WELFORD: Final = 16  # bytes of a mean, a sum of squares and two counts
_MANY_ROWS: Final = 64 << 10  # from here on a norm adds up some rows at a time
_MOST_BLOCKS: Final = 32 << 10
_aten = torch.ops.aten


def _reduction_bytes(values: Tensor, dims: Iterable[int] | None, *, accumulator: int) -> int:
    """The most bytes that a reduction takes beside its result, in blocks of torch's allocator.

    Args:
        values: what is reduced. dims: the dimensions that go; None or none: all. accumulator: bytes of one result while it is made.
    """
    if values.numel() == 0:
        return 0
    gone = {dim % max(1, values.dim()) for dim in dims or range(values.dim())}
    sizes_and_strides = [(size, values.stride(dim), dim in gone) for dim, size in enumerate(values.shape) if size > 1]
    reduced = [stride for _, stride, goes in sizes_and_strides if goes]
    kept = [stride for _, stride, goes in sizes_and_strides if not goes]
    results = math.prod(size for size, _, goes in sizes_and_strides if not goes)
    # In wider numbers than the values parts are added up beside the result.
    is_in_parts = values.nbytes > _LARGEST_OFFSET and accumulator > values.element_size()
    parts = cuda_block_bytes(accumulator * results) if is_in_parts else 0
    if not reduced:
        return parts
    is_along_rows = not kept or min(reduced) < min(kept)
    is_dense = min(reduced if is_along_rows else kept) == 1
    rows = _Rows(results, values.numel() // results, is_along_rows, is_dense)
    return parts + rows.bytes_exchanged(accumulator, count_multiprocessors(values.device))


class _Rows(NamedTuple):
    """Results of so many values each. `is_along_rows`: the values of a result are neighbours, rather than results; `is_dense`: without gaps."""

    results: int
    each: int
    is_along_rows: bool
    is_dense: bool

    def bytes_exchanged(self, accumulator: int, multiprocessors: int) -> int:
        """The most bytes for what blocks of threads exchange, and for the semaphores that guard it."""
        results, each, is_along_rows, is_dense = self
        vector, wide, high = 1, *((each, results) if is_along_rows else (results, each))
        if is_dense and is_along_rows and each >= 128:
            wide //= 4
        elif is_dense and not is_along_rows:
            vector = math.gcd(4, results)  # at most: the size of the innermost dimension counts
            wide //= vector
        most = _THREADS_OF_A_BLOCK // vector
        wide, high = min(_power_below(wide), most), min(_power_below(high), most)
        height = min(high, most // min(wide, _WARP))
        width = min(wide, most // height)

        each_thread = -(-each // width) if is_along_rows else each
        if each_thread < min(16 * height, _MOST):
            return 0
        each_thread = -(-each_thread // height)
        grid = -(-(results // vector) // (1 if is_along_rows else width))
        wanted = multiprocessors * (_THREADS_AT_ONCE // (width * height))
        if each_thread < _MOST or grid > wanted:
            return 0
        blocks = max(min(-(-wanted // grid), -(-each_thread // _FEWEST)), -(-each_thread // _MOST))
        if blocks == 1:
            return 0
        exchanged = results * blocks * (1 if is_along_rows else width * vector)
        return cuda_block_bytes(accumulator * exchanged) + cuda_block_bytes(_SEMAPHORE * grid)


def _power_below(number: int) -> int:
    """The largest power of two up to a number; 1 for zero."""
    return 1 << (max(1, number).bit_length() - 1)


def _accumulator(values: Tensor) -> int:
    """Bytes of a sum: fp32 for 16 bits, 8 bytes for whole numbers."""
    is_whole = not (values.is_floating_point() or values.is_complex())
    return 8 if is_whole else max(4, values.element_size())


def _over_dims(values: Tensor, dims: Iterable[int] | int | None = None, *_: object) -> int:
    """A sum, a mean or a largest value, over all dimensions where none are named."""
    return _reduction_bytes(values, [dims] if isinstance(dims, int) else dims, accumulator=_accumulator(values))


def _over_everything(values: Tensor, *_: object) -> int:
    return _reduction_bytes(values, None, accumulator=_accumulator(values))


def _norm(values: Tensor, _: object = 2, dims: Iterable[int] | None = None, *__: object) -> int:
    return _reduction_bytes(values, dims, accumulator=_accumulator(values))


def _variance(values: Tensor, dims: Iterable[int] | None = None, *_: Any) -> int:
    return _reduction_bytes(values, dims, accumulator=max(_WELFORD, 4 * values.element_size()))


def _layer_norm(gradient: Tensor, values: Tensor, shape: Sequence[int], _: object, __: object, *others: Any) -> int:
    """The backward of a layer norm (`LaunchGammaBetaBackwardCUDAKernel` of layer_norm_kernel.cu)."""
    return _norm_backward(gradient, values, math.prod(shape), weight=others[0], gradients=2)


def _rms_norm(
    gradient: Tensor, values: Tensor, shape: Sequence[int], _: object, weight: Tensor | None, *__: Any
) -> int:
    return _norm_backward(gradient, values, math.prod(shape), weight=weight, gradients=1)


def _norm_backward(gradient: Tensor, values: Tensor, width: int, *, weight: Tensor | None, gradients: int) -> int:
    """Copies of what does not lie row by row; of many narrow rows also sums of some of them, and what adds these up."""
    copied = sum(cuda_block_bytes(tensor.nbytes) for tensor in (gradient, values) if not tensor.is_contiguous())
    rows, multiprocessors = values.numel() // max(1, width), count_multiprocessors(values.device)
    if weight is None or rows <= _MANY_ROWS or width // _WARP >= multiprocessors // 2:
        return copied
    sums = min(_MOST_BLOCKS // -(-width // _WARP), -(-rows // _WARP))
    added = _Rows(width, sums, is_along_rows=False, is_dense=True).bytes_exchanged(4, multiprocessors)
    return copied + gradients * (cuda_block_bytes(sums * weight.nbytes) + cuda_block_bytes(weight.nbytes) + added)


REDUCTION_RULES: Final[Mapping[object, Callable[..., int]]] = MappingProxyType(
    {
        _aten.sum.default: _over_everything,
        _aten.sum.dim_IntList: _over_dims,
        _aten.mean.default: _over_everything,
        _aten.mean.dim: _over_dims,
        _aten.amax.default: _over_dims,
        _aten.amin.default: _over_dims,
        _aten.linalg_vector_norm.default: _norm,
        _aten.var.correction: _variance,
        _aten.var_mean.correction: _variance,
        _aten.std.correction: _variance,
        _aten.native_layer_norm_backward.default: _layer_norm,
        _aten._fused_rms_norm_backward.default: _rms_norm,
    }
)
"""By operation: the bytes that its kernel takes for these positional arguments, in blocks of torch's allocator."""
