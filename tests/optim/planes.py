"""Planes for tests of passes: at any address, with neighbours that must stay as they are, and values that are hard to round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SPECIAL = (
    *(0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan),
    *(1e-45, -1e-45, 1.1754942e-38, -3e-39, 1.17549435e-38),  # subnormal, and the smallest that is not
    *(3.4028235e38, -3.4028235e38, 65504.0, 65519.996, 65520.0, 6e-8, 2.9e-8),  # at the edges of fp32 and fp16
    *(1.00390625, 1.01171875, 3.3895314e38, 3.3961775e38),  # ties of bf16: to even, to odd, and at its end
)


@dataclass(frozen=True)
class Plane:
    """A plane in the middle of a larger one."""

    whole: Tensor
    start: int
    numel: int

    @classmethod
    def of(cls, values: Tensor, *, start: int = 0) -> Plane:
        """A copy of a 1-D tensor, `start` elements after an address that is a multiple of 64."""
        whole = torch.full((start + values.numel() + 1_100,), 77, dtype=values.dtype)
        whole[start : start + values.numel()] = values
        return cls(whole, start, values.numel())

    @property
    def values(self) -> Tensor:
        return self.whole[self.start : self.start + self.numel]

    def check_neighbours(self) -> None:
        """Sees that nothing beside the plane was written."""
        assert bool((self.whole[: self.start] == 77).all()), "what lies before the plane was written"
        assert bool((self.whole[self.start + self.numel :] == 77).all()), "what lies after the plane was written"


def numbers(numel: int, *, seed: int, special: bool = True) -> Tensor:
    """fp32 numbers over twelve decades, of which every third, at places by chance, is a special one."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(numel, generator=generator) * 10.0 ** (torch.rand(numel, generator=generator) * 12 - 8)
    if special:
        chosen = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (numel,), generator=generator)]
        found = torch.where(torch.rand(numel, generator=generator) < 1 / 3, chosen, found)
    return found


def planes_of(numel: int, *, seed: int = 0, special: bool = True) -> list[Tensor]:
    """(weight, grad, exp_avg, exp_avg_sq)."""
    planes = [numbers(numel, seed=4 * seed + which, special=special) for which in range(4)]
    planes[3] = planes[3].abs()
    return planes


def of_bits(bits: list[int]) -> Tensor:
    """fp32 numbers of these bit patterns, 32 bits each."""
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
