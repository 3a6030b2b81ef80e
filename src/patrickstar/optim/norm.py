"""The global norm of gradients, and the factor that clips it."""

from __future__ import annotations

import math

import torch

__all__ = ["BLOCK_NUMEL", "GlobalNorm", "clip_factor"]

BLOCK_NUMEL = 65_536
"""Elements whose squares are summed at once, counted from the start of each tensor."""


class GlobalNorm:
    """Adds up squares tensor by tensor, so that no two gradients need be in memory at once.

    Per block of 65,536 elements of each tensor `g.double().square().sum()`, blocks added left to right in fp64 in the
    order in which they come, the root in fp64, rounded once to fp32. A tensor may come in pieces of any length, in
    order: the result depends on the tensors alone. (torch's sum of a block has other last bits, in fp64, on one thread
    than on several; rounding to fp32 hides them but for one norm in some hundred million.)
    """

    def __init__(self) -> None:
        self._block = torch.empty(BLOCK_NUMEL, dtype=torch.float64, device="cpu")
        self._filled = 0
        self._total = 0.0

    @torch.no_grad()
    def add(self, piece: torch.Tensor) -> None:
        """Takes the next elements of the current tensor, as a flat piece."""
        assert piece.dim() == 1, f"a piece must be flat, not {tuple(piece.shape)}"
        start = 0
        while start < piece.numel():
            taken = min(piece.numel() - start, BLOCK_NUMEL - self._filled)
            self._block[self._filled : self._filled + taken].copy_(piece[start : start + taken])
            self._filled += taken
            start += taken
            if self._filled == BLOCK_NUMEL:
                self._sum_block()

    def end_tensor(self) -> None:
        """Ends the current tensor: the next piece starts another one, with a block of its own."""
        if self._filled:
            self._sum_block()

    def add_tensor(self, tensor: torch.Tensor) -> None:
        """Adds a whole tensor at once, in the order of its indices."""
        self.add(tensor.detach().reshape(-1))
        self.end_tensor()

    def result(self) -> torch.Tensor:
        """The norm of all tensors so far: a tensor of no dimensions, fp32. NaN or Inf where a gradient is."""
        assert not self._filled, "result() inside a tensor: end_tensor() first"
        # Through fp64: a norm beyond fp32 rounds to Inf, as in torch, where a direct conversion might refuse it.
        return torch.tensor(math.sqrt(self._total), dtype=torch.float64, device="cpu").float()

    def _sum_block(self) -> None:
        self._total += self._block[: self._filled].square_().sum().item()
        self._filled = 0


def clip_factor(max_norm: float, norm: torch.Tensor) -> torch.Tensor:
    """Factor of every gradient: max_norm / (norm + 1e-6), at most 1, in fp32; NaN for a NaN norm.

    Source: `torch.nn.utils.clip_grad_norm_`, which multiplies also where the factor is 1.
    """
    return torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
