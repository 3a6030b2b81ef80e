"""Flat views of tensors, so that a kernel need know nothing of shapes and strides."""

from __future__ import annotations

import torch

__all__ = ["dense_stride", "flat_or_copy", "put_back"]


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The stride of a tensor's own memory order: its stride where it has no holes or overlaps, else the contiguous one.

    A channels-last weight is walked in its own order: the update is element by element, so the order changes no bits.
    """
    stride = tensor.stride()
    expected = 1
    for step, size in sorted(zip(stride, tensor.shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return _contiguous_stride(tensor.shape)
        expected *= size
    return stride


def flat_or_copy(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """One-dimensional, in the memory order that `stride` describes: a view where the tensor lies so, else a copy."""
    laid = tensor.detach()
    if not _same_order(laid, stride):
        laid = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(laid)
    return laid.as_strided((laid.numel(),), (1,), laid.storage_offset())


def put_back(flat: torch.Tensor, tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    """Writes what `flat_or_copy` gave back into its tensor, where it was a copy."""
    if not _same_order(tensor, stride):
        tensor.detach().copy_(flat.as_strided(tensor.shape, stride))


def _same_order(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    # The stride of a dim of size 1 says nothing about where elements lie.
    dims = zip(tensor.shape, tensor.stride(), stride, strict=True)
    return all(size == 1 or mine == wanted for size, mine, wanted in dims)


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
