"""optim/agreement.py: what has the definition's bits agrees, and one bit too many is found. `tests/triton` has more of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from patrickstar.optim.agreement import differences
from patrickstar.optim.choose import choose_kernel
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.passes import TorchPasses

HOST = torch.device("cpu")


class OneBit:
    """The kernel, and one unit in the last place of one weight where a formula applies."""

    name = "spoiled"

    def __init__(self, where: str) -> None:
        self._kernel = choose_kernel()
        self._where = where

    def update(self, weight: Tensor, grad: Tensor, *averages: Tensor, step: int, hyper: Hyper) -> None:
        self._kernel.update(weight, grad, *averages, step=step, hyper=hyper)
        if {"always": True, "L2": not hyper.decoupled, "nearer the gradient": hyper.beta1 < 0.5}[self._where]:
            weight[7] = torch.nextafter(weight[7], torch.tensor(torch.inf))


def test_torchs_operations_agree_with_the_definition() -> None:
    assert differences(TorchPasses(choose_kernel()), HOST) == []


@pytest.mark.parametrize(
    ("where", "n_found", "part"),
    [("always", 15, "update"), ("L2", 5, "decoupled=False"), ("nearer the gradient", 5, "beta1=0.25")],
)
def test_a_bit_is_found_in_every_format(where: str, n_found: int, part: str) -> None:
    found = differences(TorchPasses(OneBit(where)), HOST)
    assert len(found) == n_found
    assert all(part in name for name in found)
