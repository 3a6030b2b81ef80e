"""The passes of a device that is no GPU: the definition in torch's operations runs in the place of Triton's kernels, and agrees with itself."""

from __future__ import annotations

import torch

from patrickstar.optim.agreement import differences
from patrickstar.optim.choose import choose_kernels
from patrickstar.optim.passes import TorchPasses

DEVICE = torch.device("cuda", 0)


def test_torchs_operations_stand_in_for_triton() -> None:
    passes = choose_kernels(DEVICE)
    assert sorted(passes) == ["cpu", "cuda"]
    assert isinstance(passes["cuda"], TorchPasses)
    assert passes["cuda"].name == "reference"


def test_the_host_and_the_device_have_the_same_bits() -> None:
    assert differences(choose_kernels(DEVICE)["cuda"], DEVICE) == []
