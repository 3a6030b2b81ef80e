import itertools

import numpy as np
import pytest
import torch

from patrickstar.optim.fma import Emulated, Native, exact_fma, fusing_operations
from tests.optim.oracle import SPECIAL, different, fma


def oracle_fma(a, b, c):
    with np.errstate(all="ignore"):
        return torch.tensor([float(fma(*element)) for element in zip(a.numpy(), b.numpy(), c.numpy(), strict=True)])


def near_ties(numel):
    """Sums a hair beside the middle between two fp32 numbers: where a second rounding goes wrong."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 2**23, (3, numel), generator=generator)
    tiny = torch.randint(1, 2**11, (numel,), generator=generator).float() * 2.0**-22
    sign = torch.where(torch.rand(numel, generator=generator) < 0.5, -1.0, 1.0)
    c = (1 + bits[0].float() * 2.0**-23) * sign
    a, b = 2.0**-12 * (1 + tiny), 2.0**-12 * (1 - tiny)
    return a, torch.where(bits[1] % 2 == 0, -b, b), c


def random_triples(numel):
    generator = torch.Generator().manual_seed(4)
    a, b, c = torch.randn(3, numel, generator=generator)
    return a, b, c * 2.0 ** torch.randint(-40, 40, (numel,), generator=generator)


def special_triples():
    return torch.tensor(list(itertools.product(SPECIAL, repeat=3))).T.contiguous()


def underflowing(numel):
    generator = torch.Generator().manual_seed(5)
    a, b, c = torch.randn(3, numel, generator=generator)
    return a * 2.0**-70, b * 2.0**-70, c * 2.0**-140


@pytest.mark.parametrize(
    "triples",
    [near_ties(1000), random_triples(1000), underflowing(1000), special_triples()],
    ids=["near ties", "random", "subnormal", "special"],
)
def test_the_emulated_fma_is_rounded_once(triples):
    assert different(exact_fma(*triples), oracle_fma(*triples)) == 0


def test_the_comparison_fails_for_two_roundings():
    a, b, c = near_ties(1000)
    in_double = (a.double() * b.double() + c.double()).float()
    assert different(in_double, oracle_fma(a, b, c)) > 0
    a, b, c = random_triples(1000)
    assert different(a * b + c, oracle_fma(a, b, c)) > 0


def test_a_fused_operation_takes_torch_and_an_unfused_one_the_emulation():
    native_is_fused = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    assert isinstance(fusing_operations(), Native if native_is_fused else Emulated)


@pytest.mark.parametrize("operation", ["plus_scaled", "lerp_", "decay_square_"])
def test_one_unfused_operation_is_enough_for_the_emulation(operation, monkeypatch):
    def plus_scaled(self, grad, weight, scale):
        return grad + weight * scale

    def lerp_(self, exp_avg, grad, blend):
        exp_avg.add_((grad - exp_avg).mul_(blend))

    def decay_square_(self, exp_avg_sq, grad, keep, add):
        exp_avg_sq.mul_(keep).add_((grad * add).mul_(grad))

    unfused = {"plus_scaled": plus_scaled, "lerp_": lerp_, "decay_square_": decay_square_}
    monkeypatch.setattr(Native, operation, unfused[operation])
    assert isinstance(fusing_operations(), Emulated)


@pytest.mark.parametrize("numel", [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 1001])
def test_torch_fuses_to_the_last_element_wherever_it_fuses(numel):
    if isinstance(fusing_operations(), Emulated):
        pytest.skip("torch does not fuse on this machine")
    for seed in range(20):
        grad, weight, exp_avg, exp_avg_sq = torch.randn(4, numel, generator=torch.Generator().manual_seed(seed))
        for blend in (0.25, 0.5, 0.75, 1.0, 0.10000000149011612):
            results = []
            for operations in (Native(), Emulated()):
                moment, square = exp_avg.clone(), exp_avg_sq.abs()
                operations.lerp_(moment, grad, blend)
                operations.decay_square_(square, grad, 0.9990000128746033, 0.0010000000474974513)
                results.append((moment, square, operations.plus_scaled(grad, weight, 0.009999999776482582)))
            assert [different(got, want) for got, want in zip(*results, strict=True)] == [0, 0, 0]
