"""The definition over tensors against exact arithmetic, element by element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.optim.definition import exact_fma
from tests.optim.oracle import SPECIAL, different, fma


def oracle_fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    with np.errstate(all="ignore"):
        return torch.tensor([float(fma(*element)) for element in zip(a.numpy(), b.numpy(), c.numpy(), strict=True)])


def near_ties(numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums a hair beside the middle between two fp32 numbers: where a second rounding goes wrong."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 2**23, (3, numel), generator=generator)
    tiny = torch.randint(1, 2**11, (numel,), generator=generator).float() * 2.0**-22
    sign = torch.where(torch.rand(numel, generator=generator) < 0.5, -1.0, 1.0)
    c = (1 + bits[0].float() * 2.0**-23) * sign
    a, b = 2.0**-12 * (1 + tiny), 2.0**-12 * (1 - tiny)
    return a, torch.where(bits[1] % 2 == 0, -b, b), c


def random_triples(numel: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    a, b, c = torch.randn(3, numel, generator=generator)
    return a, b, c * 2.0 ** torch.randint(-40, 40, (numel,), generator=generator)


def special_triples() -> Tensor:
    return torch.tensor(list(itertools.product(SPECIAL, repeat=3))).T.contiguous()


def underflowing(numel: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    a, b, c = torch.randn(3, numel, generator=generator)
    return a * 2.0**-70, b * 2.0**-70, c * 2.0**-140


@pytest.mark.parametrize(
    "triples",
    [near_ties(1000), random_triples(1000), underflowing(1000), special_triples()],
    ids=["near ties", "random", "subnormal", "special"],
)
def test_the_emulated_fma_is_rounded_once(triples: tuple[Tensor, Tensor, Tensor]) -> None:
    assert different(exact_fma(*triples), oracle_fma(*triples)) == 0


def test_the_comparison_fails_for_two_roundings() -> None:
    a, b, c = near_ties(1000)
    in_double = (a.double() * b.double() + c.double()).float()
    assert different(in_double, oracle_fma(a, b, c)) > 0
    a, b, c = random_triples(1000)
    assert different(a * b + c, oracle_fma(a, b, c)) > 0
