"""What is taken where nobody says: the GPU, and the type that it is fast in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import patrickstar
from tests.cuda.twins import batch, mlp

if TYPE_CHECKING:
    from tests.accelerator.cuda import Accelerator


def test_a_device_that_is_not_named_is_the_gpu(accelerator: Accelerator) -> None:
    model = mlp()
    with patrickstar.manage(model, torch.optim.AdamW(model.parameters()), precision="fp32") as session:
        assert {parameter.device for parameter in model.parameters()} == {torch.device("cuda", 0)}
        model(batch()).square().mean().backward()
        session.optimizer.step()
        assert session.stats().peak["device"] > 0


@pytest.mark.parametrize(("capability", "dtype"), [((9, 0), torch.bfloat16), ((7, 0), torch.float16)])
def test_a_precision_that_is_not_named_is_the_one_the_gpu_is_fast_in(
    capability: tuple[int, int], dtype: torch.dtype, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    model: nn.Module = mlp()
    with patrickstar.manage(model, torch.optim.AdamW(model.parameters())):
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_the_host_computes_where_that_is_asked_for(accelerator: Accelerator) -> None:
    model = mlp()
    with patrickstar.manage(model, torch.optim.AdamW(model.parameters()), device="cpu", precision="fp32"):
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
