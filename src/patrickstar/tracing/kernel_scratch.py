"""Scratch of kernels: bytes that an operation takes of a device and gives back before it ends, so that no mode sees them.

That of attention is large, and follows from its arguments. What other kernels take shows when a step has taken it (`step/device_level.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from patrickstar.core.chunk_size import whole_grains
from patrickstar.core.cuda_blocks import cuda_block_bytes

__all__ = ["scratch_bytes"]

_FLOAT: Final = 4  # bytes of what is accumulated
_MULTIPROCESSORS: Final = 132  # of a GPU that is not here: those of an H100
# Elements of a head up to which 16-bit kernels keep gradients of keys and values in registers.
_IN_REGISTERS: Final = 128
_BLOCKS_OF_KEYS: Final = 200  # at most so many accumulate at a time
_LENGTHS: Final = 8  # bytes for those of a sequence's queries and keys
_aten = torch.ops.aten


def scratch_bytes(operation: object, arguments: Sequence[Any]) -> int:
    """The most bytes that the kernel of an operation takes of a device beside its arguments and results."""
    rule = _RULES.get(operation)
    return 0 if rule is None else rule(*arguments)


def _flash(*arguments: Any) -> int:
    """The backward of FlashAttention-2 (`mha_bwd` of flash_api.cpp): the gradient of the query in fp32, and keys and values for each head."""
    gradient, query, key, _, out, *_ = arguments
    batch, heads, length, width = query.shape
    rows = whole_grains(length, grain=128)
    splits = 1
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        splits = -(-_multiprocessors(query.device) // max(1, batch * heads))
    sums = cuda_block_bytes(_FLOAT * batch * heads * rows)
    columns = whole_grains(width, grain=32 if width <= 128 else 64)
    accumulated = cuda_block_bytes(_FLOAT * splits * batch * heads * rows * columns)
    expanded = 0
    if key.shape[1] != heads:
        expanded = 2 * cuda_block_bytes(batch * heads * key.shape[2] * width * key.element_size())
    return sums + accumulated + expanded + _made_contiguous(gradient) + _made_contiguous(out)


def _efficient(*arguments: Any) -> int:
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


def _cudnn(*arguments: Any) -> int:
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


def _made_contiguous(tensor: Tensor) -> int:
    """Bytes of a copy [batch, length, heads, width], where the tensor [batch, heads, length, width] does not lie so."""
    _, heads, length, width = tensor.shape
    wanted = length * heads * width, width, heads * width, 1
    lies_so = all(
        size == 1 or stride == want for size, stride, want in zip(tensor.shape, tensor.stride(), wanted, strict=True)
    )
    return 0 if lies_so else cuda_block_bytes(tensor.numel() * tensor.element_size())


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


_RULES: Final[Mapping[object, Callable[..., int]]] = MappingProxyType(
    {
        _aten._scaled_dot_product_flash_attention_backward.default: _flash,
        # What is traced on the CPU in the place of a GPU.
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash,
        _aten._scaled_dot_product_efficient_attention_backward.default: _efficient,
        _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn,
        _aten._safe_softmax.default: _safe_softmax,
    }
)
