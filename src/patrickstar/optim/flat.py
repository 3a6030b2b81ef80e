"""Flat views of tensors, so that a kernel need know nothing of shapes and strides."""

from __future__ import annotations

import torch

__all__ = ["flat_or_copy", "put_back"]


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
