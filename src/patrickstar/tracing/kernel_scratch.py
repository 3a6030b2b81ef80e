"""Scratch of kernels: bytes that an operation takes of a device and gives back before it ends, so that no mode sees them.

That of attention, of gradients of tables and of reductions is large, and follows from arguments. What other kernels take shows when a step has
taken it (`step/device_level.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.tracing.attention_scratch import ATTENTION_RULES
from patrickstar.tracing.reduction_scratch import REDUCTION_RULES

__all__ = ["scratch_bytes"]

_FEW_INDICES: Final = 3072  # lookups whose gradients are added without sorting
_ROWS_OF_A_THREAD: Final = 10  # gradients of one row that are added in one place
_aten = torch.ops.aten


def scratch_bytes(operation: object, arguments: Sequence[Any]) -> int:
    """The most bytes that the kernel of an operation takes of a device beside its arguments and results."""
    rule = _RULES.get(operation)
    return 0 if rule is None else rule(*arguments)


def _table_gradient(gradient: Tensor, indices: Tensor, rows: int, _: object, by_frequency: bool = False) -> int:
    """The gradient of a table (Embedding.cu, EmbeddingBackwardKernel.cu): lookups are sorted by row, and added in fp32 in some places for each."""
    lookups = indices.numel()
    copied = 0 if gradient.is_contiguous() else cuda_block_bytes(gradient.nbytes)
    if lookups <= _FEW_INDICES and not by_frequency:
        return copied
    found = min(lookups, rows)
    places = lookups // _ROWS_OF_A_THREAD + found
    sums = cuda_block_bytes(max(4, gradient.element_size()) * places * gradient.shape[-1])
    # Sorted, where each was, where rows begin, their counts, and two that sorting takes; then parts of rows and of places, and two numbers.
    lists = 6 * [lookups] + 2 * [found] + 2 * [places] + 2 * [1]
    return copied + sums + sum(cuda_block_bytes(numbers * 8) for numbers in lists)


_RULES: Final[Mapping[object, Callable[..., int]]] = MappingProxyType(
    {**ATTENTION_RULES, **REDUCTION_RULES, _aten.embedding_dense_backward.default: _table_gradient}
)
