"""What is taken where nobody says: the GPU, and the type that it is fast in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import patrickstar
from tests.cuda.schedules import Accelerator
from tests.cuda.twins import batch, mlp


def test_a_device_that_is_not_named_is_the_gpu(accelerator: Accelerator) -> None:
    model = mlp()
    with patrickstar.manage(model, torch.optim.AdamW(model.parameters()), precision="fp32") as session:
        assert {parameter.device for parameter in model.parameters()} == {torch.device("cuda", 0)}
        model(batch()).square().mean().backward()
        session.optimizer.step()
        assert session.stats().peak["device"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_precision_that_is_not_named_is_that_of_the_model(dtype: torch.dtype, accelerator: Accelerator) -> None:
    model: nn.Module = mlp().to(dtype)
    with patrickstar.manage(model, torch.optim.AdamW(model.parameters())):
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_model_that_is_built_without_memory_has_the_values_of_ordinary_construction(
    precision: str, accelerator: Accelerator
) -> None:
    """Initialisation draws on the host, wherever the parameter is to lie."""
    with patrickstar.deferred_init():
        model = mlp()
    with patrickstar.manage(model, torch.optim.AdamW(model.parameters()), precision=precision) as session:
        for name, value in mlp().state_dict().items():
            assert torch.equal(session.state_dict()[name], value), name


def test_the_host_computes_where_that_is_asked_for(accelerator: Accelerator) -> None:
    model = mlp()
    with patrickstar.manage(model, torch.optim.AdamW(model.parameters()), device="cpu", precision="fp32"):
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
