"""Fused multiply-add on tensors: torch's own where this machine fuses, else an exact emulation.

torch's `lerp_`, `addcmul_` and `add(alpha=)` are fused in its AVX2 and AVX-512 code (and in NEON's), also in the last
elements of a tensor. They are not in its baseline code (`ATEN_CPU_CAPABILITY=default`): there a product is rounded
before it is added. `fusing_operations()` finds out by asking them, and needs no list of machines.
"""

from __future__ import annotations

from typing import Protocol

import torch

from patrickstar.core.cuda_blocks import cuda_block_bytes

__all__ = ["Emulated", "Native", "Operations", "exact_fma", "fusing_operations"]


class Operations(Protocol):
    """The three places of the update where a product is added without being rounded."""

    def plus_scaled(self, grad: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
        """fma(scale, weight, grad), as a new tensor."""
        ...

    def lerp_(self, exp_avg: torch.Tensor, grad: torch.Tensor, blend: float) -> None:
        """Moves exp_avg the share `blend` of the way to grad, from the nearer end (Note [Lerp] in `kernel.py`)."""
        ...

    def decay_square_(self, exp_avg_sq: torch.Tensor, grad: torch.Tensor, keep: float, add: float) -> None:
        """exp_avg_sq = fma(add * grad, grad, exp_avg_sq * keep)."""
        ...

    def scratch_bytes(self, numel: int) -> int:
        """The most bytes that one of them takes of a device for so many elements."""
        ...


class Native:
    """torch's operations."""

    def plus_scaled(self, grad: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
        return grad.add(weight, alpha=scale)

    def lerp_(self, exp_avg: torch.Tensor, grad: torch.Tensor, blend: float) -> None:
        exp_avg.lerp_(grad, blend)

    def decay_square_(self, exp_avg_sq: torch.Tensor, grad: torch.Tensor, keep: float, add: float) -> None:
        exp_avg_sq.mul_(keep).addcmul_(grad, grad, value=add)

    def scratch_bytes(self, numel: int) -> int:
        return cuda_block_bytes(4 * numel)


class Emulated:
    """Fused multiply-adds from separately rounded operations only, on any machine; several times slower."""

    def plus_scaled(self, grad: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
        return exact_fma(weight, scale, grad)

    def lerp_(self, exp_avg: torch.Tensor, grad: torch.Tensor, blend: float) -> None:
        way = grad - exp_avg
        if abs(blend) < 0.5:
            exp_avg.copy_(exact_fma(way, blend, exp_avg))
        else:
            exp_avg.copy_(exact_fma(way, _fp32_minus_one(blend), grad))

    def decay_square_(self, exp_avg_sq: torch.Tensor, grad: torch.Tensor, keep: float, add: float) -> None:
        exp_avg_sq.copy_(exact_fma(grad * add, grad, exp_avg_sq * keep))

    def scratch_bytes(self, numel: int) -> int:
        return 9 * cuda_block_bytes(8 * numel)


def exact_fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of fp32 numbers, rounded once to fp32; b may be a number that fp32 holds exactly.

    The product of two 24-bit numbers is exact in double. Its sum with c is rounded there, and rounding that again to
    fp32 could go the wrong way at a tie. So the sum is first rounded *to odd*: if inexact, to the neighbour whose last
    bit is 1. After that a second rounding to less than 52 bits, subnormal numbers included, gives what a single one
    gives.
    Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd".
    """
    product = a.double().mul_(b.double() if isinstance(b, torch.Tensor) else b)
    addend = c.double()
    total = product + addend
    back = total - product
    error = product.sub_(total - back).add_(addend.sub_(back))  # Knuth's two-sum: total + error is the sum, exactly
    bits = total.view(torch.int64)
    # One step away from zero where the sum was rounded towards it, else one step back. NaN and Inf stay as they are.
    away = torch.where((error > 0) == (total > 0), 1, -1)
    inexact_and_even = (error != 0) & torch.isfinite(total) & ((bits & 1) == 0)
    bits.add_(away.mul_(inexact_and_even))
    return total.float()


def fusing_operations(device: torch.device | str = "cpu") -> Operations:
    """torch's operations where they are fused on this device, else the emulation. Takes well under a millisecond on the CPU."""
    return Native() if _agrees_with_emulation(Native(), device) else Emulated()


def _agrees_with_emulation(operations: Operations, device: torch.device | str) -> bool:
    # Of 4,096 random elements about 470 (lerp), 80 (add) and 11 (addcmul) show an unfused operation. The odd length
    # shows one that is fused in its vector part only.
    generator = torch.Generator(device="cpu").manual_seed(0)
    sample = torch.randn(4, 4095, generator=generator, device="cpu", dtype=torch.float32)
    grad, weight, exp_avg, exp_avg_sq = sample.to(device)
    seen = []
    for candidate in (operations, Emulated()):
        average, square = exp_avg.clone(), exp_avg_sq.abs()
        candidate.lerp_(average, grad, 0.10000000149011612)
        candidate.decay_square_(square, grad, 0.9990000128746033, 0.0010000000474974513)
        seen.append((candidate.plus_scaled(grad, weight, 0.009999999776482582), average, square))
    return all(torch.equal(got, want) for got, want in zip(*seen, strict=True))


def _fp32_minus_one(blend: float) -> float:
    """blend - 1 for an fp32 number in [1/2, 1]: exact, by Sterbenz."""
    return blend - 1.0
