"""Planes for tests of passes: at any address, with neighbours that must stay as they are, and values that are hard to round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SPECIAL", "Plane", "differing", "numbers", "of_bits"]

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


def of_bits(bits: list[int]) -> Tensor:
    """fp32 numbers of these bit patterns, 32 bits each."""
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def differing(got: Tensor, want: Tensor) -> int:
    """The number of elements with other bits. What is NaN in one must be NaN in the other: which NaN is not compared."""
    assert got.dtype is want.dtype
    assert got.shape == want.shape
    if not got.is_floating_point():
        return int((got != want).sum())
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    same = (got.view(bits) == want.view(bits)) | (torch.isnan(got) & torch.isnan(want))
    return int((~same).sum())
