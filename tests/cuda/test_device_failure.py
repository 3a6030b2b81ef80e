"""A kernel that fails ends the use of a device: whoever comes next is told, nobody waits for ever, and what the host has is given back."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import patrickstar
from patrickstar.errors import DeviceError
from patrickstar.memory.device_failure import DeviceFailureError, noticed_at
from patrickstar.memory.stream_lane import StreamLane
from patrickstar.session.manage import assemble
from tests.cuda.twins import CHUNK, TIGHT, batch, mlp, step
from tests.parity.compare import same_bits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.accelerator.cuda import Accelerator

CUDA = torch.device("cuda", 0)


def begin(**arguments: Any) -> tuple[torch.nn.Module, Any]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    options = patrickstar.Options(chunk_size=CHUNK, poison=True)
    keywords = {"device": "cuda", "device_memory": TIGHT, "precision": "fp32", "options": options, **arguments}
    return model, assemble(model, optimizer, **keywords)


def train(model: torch.nn.Module, session: Any, steps: int) -> None:
    for number in range(steps):
        step(model, session, batch(number))


def of_python() -> set[threading.Thread]:
    """Threads that are alive, but for those of torch's engine, which come with the first backward and stay."""
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("arguments", [{}, {"step": "in_backward"}, {"max_grad_norm": 0.5}], ids=repr)
@pytest.mark.parametrize(
    ("operation", "after"),
    [("copy_", 0), ("copy_", 9), ("copy_", 40), ("aten::addmm", 3), ("aten::mul", 5), ("aten::tanh", 7)],
)
def test_whoever_comes_next_is_told_and_nothing_hangs(
    operation: str, after: int, arguments: dict[str, Any], share: float, accelerator: Accelerator, tmp_path: Path
) -> None:
    threads = of_python()
    accelerator.configure(share, 7)
    model, session = begin(disk=tmp_path / "disk", **arguments)
    train(model, session, 1)
    weights = {name: tensor.clone() for name, tensor in session.state_dict().items()}
    accelerator.fail(operation, after)
    with pytest.raises((torch.AcceleratorError, DeviceError), match="illegal memory access"):
        train(model, session, 20)
    for _ in range(2):
        with pytest.raises((torch.AcceleratorError, DeviceError), match="illegal memory access"):
            train(model, session, 1)
    try:
        session.close()
    except DeviceError as told:
        assert re.search(r"the device has failed.*illegal memory access[\s\S]*start another", str(told))
        session.close(keep_weights=False)
    else:  # the host had all that was wanted: the failed step had not begun to change it
        assert all(same_bits(weights[name], parameter.detach()) for name, parameter in model.named_parameters())
    accelerator.finish()
    assert of_python() == threads
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_checkpoint_of_before_is_whole(accelerator: Accelerator, tmp_path: Path) -> None:
    model, session = begin()
    train(model, session, 2)
    session.save_checkpoint(tmp_path / "saved")
    want = {name: value.clone() for name, value in session.state_dict().items()}
    files = {path: path.read_bytes() for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    accelerator.fail("aten::addmm", after=2)
    with pytest.raises((torch.AcceleratorError, DeviceError), match="illegal memory access"):
        train(model, session, 5)
    with pytest.raises((torch.AcceleratorError, DeviceError), match="illegal memory access"):
        session.save_checkpoint(tmp_path / "saved")
    assert {path: path.read_bytes() for path in (tmp_path / "saved").rglob("*") if path.is_file()} == files
    session.close(keep_weights=False)
    accelerator.finish()
    _, session = begin()  # in another process on a GPU, where a failure ends this one
    with session:
        session.load_checkpoint(tmp_path / "saved")
        assert all(same_bits(want[name], value) for name, value in session.state_dict().items())


def test_what_was_noticed_where_is_told(accelerator: Accelerator) -> None:
    """The step after a kernel of the user's has failed: at the norm, which the host waits for."""
    accelerator.configure(0.0)
    model, session = begin(max_grad_norm=0.5)
    train(model, session, 2)
    model(batch(2)).square().mean().backward()
    lost = torch.ones(4, device="cuda")
    accelerator.fail("aten::add")
    lost.add_(1)
    with pytest.raises(DeviceFailureError, match=r"(?s)aten::add.*noticed at .*CUDA_LAUNCH_BLOCKING") as raised:
        session.optimizer.step()
    assert raised.value.where
    session.close(keep_weights=False)
    accelerator.finish()


def test_a_moment_is_named_with_the_action(accelerator: Accelerator) -> None:
    accelerator.configure(1.0)
    model, session = begin()
    train(model, session, 2)
    inputs, lost = batch(), torch.ones(4, device="cuda")
    accelerator.fail("aten::add")
    lost.add_(1)
    with pytest.raises(DeviceFailureError) as raised:
        model(inputs)
    assert "0.weight" in raised.value.where or "in op" in raised.value.where, raised.value.where
    session.close(keep_weights=False)
    accelerator.finish()


def test_a_lane_of_a_failed_device_ends_its_tickets(accelerator: Accelerator) -> None:
    lane = StreamLane("test", CUDA)
    tensor = torch.zeros(8, device=CUDA)
    accelerator.configure(1.0)
    accelerator.fail("aten::add")
    first = lane.issue(lambda: tensor.add_(1))
    behind = lane.issue(lambda: tensor.mul_(2), [first])
    for ticket in (first, behind):
        for _ in range(2):
            with pytest.raises(DeviceFailureError, match="illegal memory access"):
                ticket.wait()
        assert ticket.done
    lane.close()
    accelerator.finish()


def test_what_has_failed_is_done(accelerator: Accelerator) -> None:
    """Whoever asks, and does not wait, is not told for ever that it goes on."""
    lane = StreamLane("test", CUDA)
    tensor = torch.zeros(8, device=CUDA)
    accelerator.configure(0.0)
    accelerator.fail("aten::add")
    ticket = lane.issue(lambda: tensor.add_(1))
    with pytest.raises(torch.AcceleratorError):
        torch.cuda.synchronize()
    assert ticket.done
    with pytest.raises(DeviceFailureError):
        ticket.wait()
    lane.close()
    accelerator.finish()


def test_the_innermost_place_is_named() -> None:
    with pytest.raises(DeviceFailureError, match="noticed at a transfer") as raised, noticed_at("the step"):
        with noticed_at("a transfer"):
            raise DeviceFailureError("illegal memory access")
    assert raised.value.where == "a transfer"
