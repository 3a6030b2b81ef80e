"""Workspaces of cuBLAS and cuBLASLt: torch gives them memory when a thread first multiplies on a stream, and keeps it."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint


def fill_workspaces() -> None:
    """Takes products of every kind in the threads of forward and backward, so that all that they keep is there.

    A forward that is done again has products with a bias in the backward's thread too: these are cuBLASLt's.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        left = torch.ones(64, 64, device="cuda", dtype=dtype, requires_grad=True)
        checkpoint(_of_a_product_with_a_bias, left @ left, left, use_reentrant=False).sum().backward()
    torch.cuda.synchronize()


def _of_a_product_with_a_bias(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A function whose derivative needs the product, so that a forward that is done again does not end before it."""
    return torch.nn.functional.linear(left, right, right[0]).sin()
