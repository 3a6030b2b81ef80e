"""Scratch of attention's kernels, by the sources of torch and cudnn-frontend. Queries, keys and values are [batch, heads, length, width]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from patrickstar.core.chunk_size import whole_grains
from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.tracing.multiprocessors import count_multiprocessors

__all__ = ["ATTENTION_RULES"]

_FLOAT: Final = 4  # bytes of what is accumulated
# Elements of a head up to which 16-bit kernels keep gradients of keys and values in registers.
_IN_REGISTERS: Final = 128
_BLOCKS_OF_KEYS: Final = 200  # at most so many accumulate at a time
_LENGTHS: Final = 8  # bytes for those of a sequence's queries and keys
_MOST_SPLITS: Final = 128
_aten = torch.ops.aten


def _flash(*arguments: Any) -> int:
    """FlashAttention-2 (`set_params_splitkv` of flash_api.cpp): results of parts of the keys, where there are few queries for the device."""
    query, key, _, *others = arguments
    batch, heads, length, width = query.shape
    dropout = others[0] if others else 0.0
    splits = 1 if dropout else _splits(batch * heads * -(-length // 64), key.shape[2], width, query.device)
    if splits == 1:
        return 0
    rows = splits * batch * heads * length
    return cuda_block_bytes(_FLOAT * rows) + cuda_block_bytes(_FLOAT * rows * _wide(width))


def _splits(blocks: int, keys: int, width: int, device: torch.device) -> int:
    """The fewest parts of the keys that use the device nearly as well as any do (`num_splits_heuristic`), for so many blocks of 64 queries."""
    at_once = 2 * count_multiprocessors(device)
    if not blocks or blocks >= 0.8 * at_once:
        return 1
    blocks_of_keys = -(-keys // (256 if width <= 64 else 128 if width <= 128 else 64))

    def used(splits: int) -> float:
        waves = blocks * splits / at_once
        return waves / -(-blocks * splits // at_once)

    candidates = [
        splits
        for splits in range(1, min(_MOST_SPLITS, at_once, blocks_of_keys) + 1)
        if splits == 1 or -(-blocks_of_keys // splits) != -(-blocks_of_keys // (splits - 1))
    ]
    best = max(map(used, candidates), default=0.0)
    return next((splits for splits in candidates if used(splits) >= 0.85 * best), 1)


def _flash_backward(*arguments: Any) -> int:
    """The backward of FlashAttention-2 (`mha_bwd` of flash_api.cpp): the gradient of the query in fp32, and keys and values for each head."""
    gradient, query, key, _, out, *_ = arguments
    batch, heads, length, width = query.shape
    rows = whole_grains(length, grain=128)
    splits = 1
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        splits = -(-count_multiprocessors(query.device) // max(1, batch * heads))
    sums = cuda_block_bytes(_FLOAT * batch * heads * rows)
    accumulated = cuda_block_bytes(_FLOAT * splits * batch * heads * rows * _wide(width))
    expanded = 0
    if key.shape[1] != heads:
        expanded = 2 * cuda_block_bytes(batch * heads * key.shape[2] * width * key.element_size())
    return sums + accumulated + expanded + _made_contiguous(gradient) + _made_contiguous(out)


def _efficient_backward(*arguments: Any) -> int:
    """The backward of memory-efficient attention (attention_backward.cu, and `workspace_size` of kernel_backward.h), at most."""
    gradient, query, _, value, _, out, *_ = arguments
    batch, heads, length, width = query.shape
    widest, is_half = max(width, value.shape[3]), query.element_size() == 2
    sums = cuda_block_bytes(_FLOAT * batch * heads * length)
    products = keys = 0
    if not is_half or widest > _IN_REGISTERS:
        # The kernel does not make the sums itself: of two wide copies where they are not wide, and their product.
        products = sums + (3 if is_half else 1) * cuda_block_bytes(_FLOAT * out.numel())
    if is_half and widest > _IN_REGISTERS:
        keys = 2 * max(batch * heads, _BLOCKS_OF_KEYS) * 128 * whole_grains(widest, grain=128)
    # And a lock for each block of rows.
    queries = batch * heads * whole_grains(length, grain=128) * (whole_grains(width, grain=128) + 1)
    return sums + products + cuda_block_bytes(_FLOAT * (keys + queries)) + _made_contiguous(gradient)


def _cudnn_backward(*arguments: Any) -> int:
    """The backward of cuDNN's attention (`CompositeSDPABackwardNode` of cudnn-frontend): a block for what FlashAttention takes several for."""
    gradient, query, key, value, *_ = arguments
    batch, heads, length, width = query.shape
    # The gradient of the query, and a sum for each of its rows.
    accumulated = _FLOAT * batch * heads * length * (width + 1)
    of_each_head = sum(
        batch * heads * shared.shape[2] * shared.shape[3] * shared.element_size()
        for shared in (key, value)
        if shared.shape[1] != heads
    )
    copied = 0 if gradient.stride(3) == 1 else cuda_block_bytes(gradient.nbytes)
    return cuda_block_bytes(accumulated + of_each_head + _LENGTHS * batch) + copied


def _safe_softmax(scores: Tensor, *_: object) -> int:
    """The softmax of attention by its definition, which looks for rows that are masked as a whole (attention.cpp)."""
    masked = cuda_block_bytes(scores.numel())
    rows = cuda_block_bytes(scores.numel() // max(1, scores.shape[-1]))
    return masked + rows + 2 * cuda_block_bytes(1)


def _wide(width: int) -> int:
    """Columns of a head as FlashAttention accumulates them."""
    return whole_grains(width, grain=32 if width <= 128 else 64)


def _made_contiguous(tensor: Tensor) -> int:
    """Bytes of a copy [batch, length, heads, width], where the tensor [batch, heads, length, width] does not lie so."""
    _, heads, length, width = tensor.shape
    wanted = length * heads * width, width, heads * width, 1
    lies_so = all(
        size == 1 or stride == want for size, stride, want in zip(tensor.shape, tensor.stride(), wanted, strict=True)
    )
    return 0 if lies_so else cuda_block_bytes(tensor.numel() * tensor.element_size())


ATTENTION_RULES: Final[Mapping[object, Callable[..., int]]] = MappingProxyType(
    {
        _aten._scaled_dot_product_flash_attention.default: _flash,
        _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
        # What is traced on the CPU in the place of a GPU.
        _aten._scaled_dot_product_flash_attention_for_cpu.default: _flash,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward,
        _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
        _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
        _aten._safe_softmax.default: _safe_softmax,
    }
)
"""By operation: the bytes that its kernel takes for these positional arguments, in blocks of torch's allocator."""
