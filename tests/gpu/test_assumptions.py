"""More that the library relies on at a CUDA device, beside `test_traps.py`: threads that map, copies that do not wait, bits of plain PyTorch."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from patrickstar.memory.arena import Arena
from patrickstar.memory.driver import DeviceAddresses, granule_bytes
from patrickstar.memory.space import DeviceSpace, PinnedSpace
from patrickstar.memory.stream_lane import StreamLane
from tests.gpu.test_traps import over

CUDA = torch.device("cuda", 0)
MIB = 1 << 20
LATE_S = 0.2
HIDDEN_S = 0.05  # what returns before this has not waited for what takes LATE_S

device_only = pytest.mark.device_only


@pytest.fixture
def addresses() -> Iterator[DeviceAddresses]:
    made = DeviceAddresses(4 * granule_bytes(0), device=0)
    yield made
    torch.accelerator.synchronize()
    made.close()


def keep_busy(seconds: float) -> None:
    """Queues that much work on the current stream of a GPU."""
    torch.cuda._sleep(int(seconds * 1.5e9))  # cycles, of at most 2e9 a second


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# a fresh process


FRESH = """
import torch, patrickstar
from torch import nn
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
session = patrickstar.manage(model, torch.optim.AdamW(model.parameters()), device="cuda", precision="fp32", device_memory="288MiB")
for _ in range(3):
    model(torch.ones(2, 64, device="cuda")).square().mean().backward()
    session.optimizer.step()
    session.optimizer.zero_grad()
session.close()
print("trained", all(p.isfinite().all() for p in model.parameters()))
"""


@device_only
def test_a_session_is_the_first_thing_that_a_process_does_with_cuda() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=80, check=False)
    assert done.stdout == "trained True\n", done.stderr[-1500:]


# streams


def test_a_stream_has_a_number_that_names_it_everywhere() -> None:
    side = torch.Stream(device=CUDA)
    with side:
        assert torch.accelerator.current_stream(CUDA).stream_id == side.stream_id
        assert torch.cuda.current_stream().stream_id == side.stream_id
    users = torch.cuda.Stream()
    with torch.cuda.stream(users):
        assert torch.accelerator.current_stream(CUDA).stream_id == users.stream_id
    assert len({side.stream_id, users.stream_id, torch.accelerator.current_stream(CUDA).stream_id}) == 3


# memory of the driver


def test_memory_is_mapped_from_a_thread_that_has_not_used_cuda(addresses: DeviceAddresses) -> None:
    failed = list[BaseException]()

    def use() -> None:
        try:
            addresses.map(0, granule_bytes(0))
            over(addresses.start, 16).fill_(3)
            torch.accelerator.synchronize()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert not failed
    assert over(addresses.start, 16).sum().item() == 48


def test_kernels_of_two_streams_use_neighbours_of_what_is_mapped_meanwhile(addresses: DeviceAddresses) -> None:
    granule = granule_bytes(0)
    addresses.map(0, granule)
    first = over(addresses.start, granule // 4).zero_()
    side = torch.Stream(device=CUDA)
    side.wait_stream(torch.accelerator.current_stream())
    for _ in range(50):
        first.add_(1)
    addresses.map(granule, granule)
    with side:
        second = over(addresses.start + granule, granule // 4).zero_()
        for _ in range(50):
            second.add_(2)
    torch.accelerator.synchronize()
    assert (first.min().item(), first.max().item()) == (50, 50)
    assert (second.min().item(), second.max().item()) == (100, 100)


@device_only
def test_mapping_does_not_wait_for_kernels(addresses: DeviceAddresses, record_property: Callable[..., None]) -> None:
    addresses.map(0, granule_bytes(0))
    torch.cuda.synchronize()
    keep_busy(LATE_S)
    seconds = seconds_of(lambda: addresses.map(granule_bytes(0), granule_bytes(0)))
    record_property("map_seconds", seconds)
    assert seconds < HIDDEN_S


# pinned memory


def arena(space: Callable[..., Any], slot_bytes: int) -> Arena:
    return Arena(slot_bytes, virtual_slots=16, name="test", make_space=space)


@device_only
@pytest.mark.parametrize("way", ["to the device", "to the host"])
def test_a_copy_of_pinned_slots_returns_before_it_has_begun(way: str, record_property: Callable[..., None]) -> None:
    host, device = arena(PinnedSpace, 4 * MIB), arena(partial(DeviceSpace, device=CUDA), 4 * MIB)
    there, here = host.take(4), device.take(4)
    copy = device.copying(here, 4, host, there) if way == "to the device" else host.copying(there, 4, device, here)
    copy()
    torch.cuda.synchronize()
    keep_busy(LATE_S)
    queued = seconds_of(copy)
    waited = seconds_of(torch.cuda.synchronize)
    record_property("queued_seconds", queued)
    host.close()
    device.close()
    assert waited > HIDDEN_S  # the stream was busy, and the copy came after that
    assert queued < HIDDEN_S


# streams, events and threads


@device_only
def test_waiting_on_the_device_keeps_no_thread_waiting(record_property: Callable[..., None]) -> None:
    lane, target = StreamLane("test", CUDA), torch.zeros(8, device=CUDA)
    torch.cuda.synchronize()
    ticket = lane.issue(lambda: keep_busy(LATE_S))
    seconds = seconds_of(lambda: (ticket.wait_on_device(), target.add_(1)))
    record_property("wait_on_device_seconds", seconds)
    assert not ticket.done
    assert target.sum().item() == 8
    assert ticket.done
    lane.close()
    assert seconds < HIDDEN_S


# bits of plain PyTorch, without which no comparison means anything


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_pytorch_has_the_same_bits_twice(dtype: torch.dtype) -> None:
    def train() -> list[Tensor]:
        torch.manual_seed(0)
        table = torch.randn(50, 64).to(CUDA, dtype).requires_grad_()
        weight = torch.randn(3 * 64, 64).div(8).to(CUDA, dtype).requires_grad_()
        tokens = torch.arange(96, device=CUDA).view(2, 48) % 7
        q, k, v = F.linear(F.embedding(tokens, table), weight).view(2, 48, 3, 4, 16).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 48, 64)
        F.cross_entropy(F.linear(mixed, table).float().flatten(0, 1), tokens.flatten() % 50).backward()
        assert table.grad is not None
        assert weight.grad is not None
        return [table.grad, weight.grad]

    wanted = train()
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(train(), wanted))
