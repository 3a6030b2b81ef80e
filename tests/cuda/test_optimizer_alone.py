"""`patrickstar.AdamW` in place of torch's, with no session: on a device it has the bits of the host."""

from __future__ import annotations

import pytest
import torch

import patrickstar
from tests.cuda.schedules import Accelerator


def parameter(device: str, dtype: torch.dtype) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(5)
    return torch.nn.Parameter(torch.randn(7, 9, generator=generator).to(dtype).to(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [patrickstar.AdamW, patrickstar.Adam])
def test_parameters_on_a_device_step_as_those_of_the_host(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype, accelerator: Accelerator
) -> None:
    there, here = parameter("cuda", dtype), parameter("cpu", dtype)
    on_device, on_host = kind([there], lr=1e-3), kind([here], lr=1e-3)  # type: ignore[call-arg]
    for step in range(3):
        gradient = torch.randn(7, 9, generator=torch.Generator().manual_seed(step)).to(dtype)
        there.grad, here.grad = gradient.to("cuda"), gradient
        on_device.step()
        on_host.step()
    assert torch.equal(there.cpu(), here)
    for key, value in on_host.state[here].items():
        found = on_device.state[there][key]
        assert found.device == (value.device if key == "step" else there.device)
        assert torch.equal(found.cpu(), value), key


def test_a_state_goes_between_devices(accelerator: Accelerator) -> None:
    there, here = parameter("cuda", torch.bfloat16), parameter("cpu", torch.bfloat16)
    on_device, on_host = patrickstar.AdamW([there]), patrickstar.AdamW([here])
    there.grad = torch.ones_like(there)
    on_device.step()
    saved = on_device.state_dict()
    saved["state"] = {
        0: {key: value.clone() for key, value in saved["state"][0].items()}
    }  # torch loads `step` as it is, uncopied
    on_host.load_state_dict(saved)
    with torch.no_grad():
        here.copy_(there.cpu())
    for one in (there, here):
        one.grad = torch.full_like(one, 0.5)
    on_device.step()
    on_host.step()
    assert torch.equal(there.cpu(), here)
    assert on_host.state[here]["rest"].device.type == "cpu"


def test_a_count_that_a_fused_optimizer_left_on_the_device_is_taken_to_the_host_once(accelerator: Accelerator) -> None:
    there = parameter("cuda", torch.float32)
    optimizer = patrickstar.AdamW([there])
    there.grad = torch.ones_like(there)
    optimizer.step()
    optimizer.state[there]["step"] = optimizer.state[there]["step"].to("cuda")
    optimizer.step()
    assert optimizer.state[there]["step"].device.type == "cpu"
    assert optimizer.state[there]["step"].item() == 2
