"""The passes of a device that is no GPU: torch's operations run in the place of Triton's kernels, and have the definition's bits."""

from __future__ import annotations

import pytest
import torch

from patrickstar.optim import reference
from patrickstar.optim.choose import choose_kernels
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.masters import join, rest_type, split
from patrickstar.optim.passes import Passes
from tests.optim.definition import Definition

DEVICE = torch.device("cuda", 0)


def test_torchs_operations_stand_in_for_triton() -> None:
    passes = choose_kernels(DEVICE)
    assert sorted(passes) == ["cpu", "cuda"]
    assert type(passes["cuda"]) is Passes
    assert passes["cuda"].kernel is reference.update


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("decoupled", "beta1"), [(True, 0.9), (False, 0.9), (True, 0.25)])
def test_the_host_and_the_device_have_the_same_bits(kept: torch.dtype, decoupled: bool, beta1: float) -> None:
    hyper = Hyper(lr=1e-3, beta1=beta1, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=decoupled)
    sample = torch.randn(4, 4099, generator=torch.Generator().manual_seed(1))
    sample[3].abs_()
    want, there = sample.clone(), sample.to(DEVICE)
    want[1] = sample[1].to(kept)
    want[1].mul_(torch.tensor(0.7)).mul_(torch.tensor(1 / 3))
    Definition().update(*want, step=3, hyper=hyper)

    passes, (master, grad, *averages) = choose_kernels(DEVICE)["cuda"], there
    parts = (master, None)
    if kept is not torch.float32:
        parts = (torch.empty_like(master, dtype=kept), torch.empty_like(master, dtype=rest_type(kept)))
        split(master, *parts)
    factors = (torch.tensor(0.7, device=DEVICE), torch.tensor(1 / 3))
    passes.update(*parts, grad.to(kept), *averages, step=3, hyper=hyper, factors=factors)
    if kept is not torch.float32:
        join(*parts, master)
    for plane in (0, 2, 3):
        assert torch.equal(there[plane].cpu().view(torch.int32), want[plane].view(torch.int32))
