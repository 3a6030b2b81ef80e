"""Passes in torch's operations: what is found not to be finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from patrickstar.optim.choose import choose_kernel
from patrickstar.optim.passes import Passes

PASSES = Passes(choose_kernel())


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1.0])
def test_what_is_put_is_looked_at(adds: bool, bad: float) -> None:
    target, source = torch.ones(3, dtype=torch.bfloat16), torch.tensor([2.0, bad, 3.0])
    is_finite = torch.ones((), dtype=torch.int32)
    PASSES.put(target, source, adds=adds, is_finite=is_finite)
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
