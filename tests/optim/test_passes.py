"""Passes in torch's operations: each format by the kernel that it is for, and what is found not to be finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from patrickstar.optim.choose import choose_kernel
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.norm import GlobalNorm
from patrickstar.optim.passes import TorchPasses

HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
PASSES = TorchPasses(choose_kernel())


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1.0])
def test_what_is_put_is_looked_at(adds: bool, bad: float) -> None:
    target, source = torch.ones(3, dtype=torch.bfloat16), torch.tensor([2.0, bad, 3.0])
    is_finite = torch.ones((), dtype=torch.int32)
    PASSES.put_and_look(target, source, is_finite, adds=adds)
    assert target.tolist()[::2] == ([3.0, 4.0] if adds else [2.0, 3.0])
    assert is_finite.item() == (bad == 1.0) == found(target)


def test_of_nothing_nothing_is_infinite() -> None:
    assert found(torch.empty(0)) == 1


def test_what_has_been_found_is_not_forgotten() -> None:
    assert found(torch.tensor([torch.inf]), torch.ones(1)) == 0


def found(*pieces: Tensor) -> float:
    """What looks at these pieces, one after the other, make of a number."""
    is_finite = torch.ones((), dtype=torch.int32)
    for piece in pieces:
        PASSES.look(piece, is_finite)
    return is_finite.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_of_the_gradient_times_its_factors(dtype: torch.dtype) -> None:
    piece, factors = torch.randn(70_000).to(dtype), [torch.tensor(0.3), torch.tensor(1.7)]
    norm, want = PASSES.norm(None), GlobalNorm()
    norm.add(piece[:1_000], factors)
    norm.add(piece[1_000:], factors)
    norm.end_tensor()
    want.add_tensor(piece.float() * factors[0] * factors[1])
    assert norm.sum_of_squares() == want.sum_of_squares()
    assert norm.result() == want.result()
