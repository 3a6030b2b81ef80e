"""Faults: a clear error, no hang, and a session that goes on or a process that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import patrickstar
from tests.cuda.schedules import Accelerator
from tests.cuda.twins import TIGHT, batch, mlp, square, twins

MIB = 1 << 20
device_only = pytest.mark.device_only


def run(program: str, *, within_s: int = 80, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=within_s, check=False, env={**os.environ, **environment},
    )  # fmt: skip


PREPARE = """
import torch, patrickstar
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
def begin(device_memory="272MiB", **arguments):
    return patrickstar.manage(model, torch.optim.AdamW(model.parameters()), device="cuda", precision="fp32",
                              device_memory=device_memory, **arguments)
def step(session, after_forward=int):
    loss = model(torch.ones(4, 256, device="cuda")).square().mean()
    after_forward()
    loss.backward()
    session.optimizer.step()
    session.optimizer.zero_grad()
def warm_up():
    x = torch.ones(256, 256, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
"""


@device_only
def test_without_a_device_cuda_is_refused_in_words() -> None:
    done = run(PREPARE + "begin()", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "DeviceError" in done.stderr
    assert "no CUDA device" in done.stderr


@device_only
def test_a_kernel_that_fails_ends_the_step_with_an_error_and_the_process_with_it() -> None:
    """A failed assertion on the device shows later, at some wait; after it nothing of CUDA works in this process."""
    program = """
session = begin()
warm_up()
step(session)
step(session, lambda: torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")])
for _ in range(3):
    step(session)
torch.cuda.synchronize()
print("nothing was noticed")
"""
    done = run(PREPARE + program)
    assert done.returncode != 0
    assert "nothing was noticed" not in done.stdout
    assert "device-side assert" in done.stderr or "DeviceError" in done.stderr, done.stderr[-800:]


@device_only
def test_an_interrupt_ends_a_process_that_trains() -> None:
    program = """
import os, signal, threading, time
session = begin()
warm_up()
step(session)
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    while True:
        step(session)
except KeyboardInterrupt:
    session.optimizer.zero_grad()
    for _ in range(3):
        step(session)
    torch.cuda.synchronize()
    session.close()
    print("went on", all(p.isfinite().all() for p in model.parameters()))
"""
    done = run(PREPARE + program)
    assert done.stdout == "went on True\n", done.stderr[-1500:]


@device_only
def test_memory_that_another_process_takes_between_plan_and_step_is_named() -> None:
    """All but a little of the device is taken by a second process; when that has ended, the session goes on."""
    program = """
import gc, subprocess, sys
session = begin(device_memory="1GiB")
warm_up()  # cuBLAS says nothing of memory where it has none for itself
taker = subprocess.Popen([sys.executable, "-c", '''
import torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - (6 << 20), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("taken", flush=True)
input()
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert taker.stdout.readline() == "taken\\n"
try:
    step(session)
    print("trained beside it")
except (patrickstar.Error, torch.OutOfMemoryError) as error:
    print("refused", type(error).__name__, "free" in str(error), str(error)[:200].replace(chr(10), " "))
taker.communicate("\\n")
gc.collect()
session.optimizer.zero_grad()
for _ in range(3):
    step(session)
torch.cuda.synchronize()
session.close()
print("went on", all(p.isfinite().all() for p in model.parameters()))
"""
    done = run(PREPARE.replace("256", "1024") + program)
    lines = done.stdout.splitlines()
    assert lines[-1:] == ["went on True"], done.stdout + done.stderr[-1500:]
    assert lines[0] == "trained beside it" or lines[0].startswith(("refused BudgetError", "refused DeviceError"))


@device_only
def test_a_loader_forks_workers_while_a_session_has_the_device() -> None:
    program = """
from torch.utils.data import DataLoader
session = begin()
step(session)
for rows in DataLoader(torch.ones(12, 256), batch_size=4, num_workers=2, multiprocessing_context="fork"):
    model(rows.cuda()).square().mean().backward()
    session.optimizer.step()
    session.optimizer.zero_grad()
torch.cuda.synchronize()
session.close()
print("trained")
"""
    done = run(PREPARE + program)
    assert done.stdout == "trained\n", done.stderr[-1500:]


def interrupt(*_: object) -> None:
    signal.raise_signal(signal.SIGINT)


def fail(*_: object) -> None:
    raise ValueError("as told")


@pytest.mark.parametrize(("stop", "error"), [(interrupt, KeyboardInterrupt), (fail, ValueError)])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_ends_a_step_early_leaves_a_session_that_trains_on(
    where: str, stop: Callable[..., None], error: type[BaseException], accelerator: Accelerator
) -> None:
    accelerator.configure(0.3, 1)

    def at_the_third_layer(module: nn.Module, inputs: object, output: Tensor) -> None:
        if where == "forward":
            stop()
        output.register_hook(stop)

    with twins(device_memory=TIGHT) as pair:
        pair.train(2)
        handle = pair.model[4].register_forward_hook(at_the_third_layer)
        with pytest.raises(error):
            square(pair.model, batch(9)).backward()
        handle.remove()
        pair.session.optimizer.zero_grad()
        pair.train(2, first=2)
        pair.expect_same()


@pytest.mark.parametrize("pins", [False, True])
def test_two_sessions_that_take_turns_do_not_disturb_each_other(pins: bool, accelerator: Accelerator) -> None:
    accelerator.configure(0.3, 1, **({} if pins else {"most_pinned": 0}))
    with twins() as first, twins(step="in_backward") as second:
        for number in range(3):
            first.train(1, first=number)
            second.train(1, first=number)
        first.expect_same()
        second.expect_same()


def test_what_cannot_be_is_refused_before_anything_has_changed(accelerator: Accelerator) -> None:
    model = mlp()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    taken = accelerator.driver_bytes()
    for arguments in ({"device": "cuda:7"}, {"device": "cuda", "device_memory": 1024}):
        with pytest.raises(patrickstar.Error):
            patrickstar.manage(model, torch.optim.AdamW(model.parameters()), precision="fp32", **arguments)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters()))
    assert accelerator.driver_bytes() == taken
