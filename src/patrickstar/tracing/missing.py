"""Operations that fake tensors cannot do in every type that real ones can, or answer with another type or in less memory: their results, by shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from patrickstar.torch_private import Undispatched

_aten = torch.ops.aten
_REDUCED = frozenset((_aten.mse_loss, _aten.smooth_l1_loss, _aten.binary_cross_entropy, _aten.soft_margin_loss))


def result_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operation on fake tensors."""
    # The grouped product of experts: torch 2.13 has it for CPUs in fp32, and its shape rule in bf16 alone.
    if func is _aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
        return _grouped_product(*args, **kwargs)
    # The state of a device's generator, which checkpointing sets again: no input of the model, and real.
    if func is _aten.clone.default and type(args[0]) is Tensor and args[0].dtype is torch.uint8:
        with Undispatched():
            return func(*args, **kwargs)
    result = func(*args, **kwargs)
    # One number, in the memory of as many as there were before they were reduced.
    if func.overloadpacket in _REDUCED and not result.ndim:
        return args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape)).as_strided((), ())
    # 16-bit inputs of a batch norm that stays fp32: what it saves for backward is fp32 too.
    if func is _aten.native_batch_norm.default and args[1] is not None:
        return (result[0], *(saved.new_empty(saved.shape, dtype=args[1].dtype) for saved in result[1:]))
    # An LSTM's two biases have one gradient. So they have in a trial run, but where torch's cache of fake results makes two of it.
    if func is _aten.mkldnn_rnn_layer_backward.default:
        return (*result[:4], result[3], *result[5:])
    return result


def _grouped_product(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """A product [M, K] x [G, K, N], [G, M, K] x [K, N], [G, M, K] x [G, K, N], or [M, K] x [K, N] with K in G groups."""
    rows, columns = left.shape[-2], right.shape[-1]
    if left.ndim == right.ndim:
        groups = left.shape[0] if left.ndim == 3 or offsets is None else offsets.shape[0]
        return left.new_empty((groups, rows, columns))
    return left.new_empty((rows, columns))
