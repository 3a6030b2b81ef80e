"""The device of these tests does what CUDA does, and reports what CUDA would let pass."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patrickstar.errors import DeviceError
from patrickstar.memory.driver import DeviceAddresses
from tests.accelerator.cuda import Accelerator
from tests.cuda.schedules import SCHEDULES
from tests.gpu.test_traps import over

FAULTS = ["none", "no wait before the copy out", "no wait after the copy in", "no record_stream"]
MIB = 1 << 20
GRANULE = 2 * MIB


def there_and_back(fault: str) -> Tensor:
    """Copies a tensor out on a side stream, frees it, brings it back and uses it. A tensor on the host."""
    main, side = torch.accelerator.current_stream(), torch.Stream(device="cuda")
    computed = torch.arange(1000.0).to("cuda") * 2
    host = torch.empty(1000, pin_memory=True)
    if fault != "no wait before the copy out":
        side.wait_event(main.record_event())
    with side:
        host.copy_(computed, non_blocking=True)
    if fault != "no record_stream":
        computed.record_stream(side)
    del computed
    torch.ones(1000, device="cuda")  # may take the place of what is gone
    with side:
        back = torch.empty(1000, device="cuda")
        back.copy_(host, non_blocking=True)
    if fault != "no wait after the copy in":
        main.wait_event(side.record_event())
    back.record_stream(main)
    return (back + 1).cpu()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_race_is_reported_under_every_schedule(
    fault: str, schedule: tuple[float, int], accelerator: Accelerator
) -> None:
    accelerator.configure(*schedule)
    result = there_and_back(fault)
    races = accelerator.races()
    assert bool(races) == (fault != "none")
    if fault == "none":
        assert torch.equal(result, torch.arange(1000.0) * 2 + 1)


def test_with_nothing_run_early_what_lacks_a_wait_is_wrong(accelerator: Accelerator) -> None:
    right = torch.arange(1000.0) * 2 + 1
    accelerator.configure(0.0)
    assert not torch.equal(there_and_back("no wait after the copy in"), right)
    accelerator.configure(1.0)  # as on a device that is fast enough: only the checker knows
    assert torch.equal(there_and_back("no wait after the copy in"), right)
    assert accelerator.races()


@pytest.mark.parametrize("by", ["an operation", "pwritev", "pwrite"])
@pytest.mark.parametrize("waits", [True, False])
def test_the_host_has_to_wait_for_pinned_memory_that_a_copy_fills(
    by: str, waits: bool, accelerator: Accelerator, tmp_path: Path
) -> None:
    host = torch.empty(64, pin_memory=True)
    host.copy_(torch.ones(64, device="cuda"), non_blocking=True)
    if waits:
        torch.accelerator.current_stream().synchronize()
    if by == "an operation":
        host.sum()
    else:
        with (tmp_path / "file").open("wb") as file:
            bytes_of = memoryview(host.numpy())
            getattr(os, by)(file.fileno(), [bytes_of] if by == "pwritev" else bytes_of, 0)
    assert bool(accelerator.races()) == (not waits)


def test_the_host_may_not_write_pinned_memory_that_is_being_copied(accelerator: Accelerator) -> None:
    host = torch.ones(64, pin_memory=True)
    device = torch.empty(64, device="cuda")
    device.copy_(host, non_blocking=True)
    host.zero_()
    (race,) = accelerator.races()
    assert "aten::zero_ writes on the host unordered after copy_ read on stream 0 (pinned memory" in race


@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
def test_a_file_is_not_read_into_pinned_memory_that_is_being_copied(
    when: str, accelerator: Accelerator, tmp_path: Path
) -> None:
    accelerator.configure(0.0)
    host, device = torch.ones(64, pin_memory=True), torch.empty(64, device="cuda")
    path = tmp_path / "file"
    path.write_bytes(bytes(host.nbytes))

    def read(*arguments: Any) -> int:
        count = os.preadv(*arguments[:3])
        if when == "meanwhile":  # of another thread
            device.copy_(host, non_blocking=True)
        return count

    with path.open("rb") as file:
        if when == "before":
            device.copy_(host, non_blocking=True)
        accelerator.seen("a read", read, writes=True)(file.fileno(), [memoryview(host.numpy())], 0)
        if when == "after":
            device.copy_(host, non_blocking=True)
    races = accelerator.races()
    assert bool(races) == (when != "after")
    assert when != "meanwhile" or "a read writes on the host unordered after copy_ read" in races[0]


def test_reads_of_two_streams_are_no_race(accelerator: Accelerator) -> None:
    tensor = torch.ones(64, device="cuda")
    side = torch.Stream(device="cuda")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        tensor.sum()
    tensor.record_stream(side)
    tensor.sum()
    assert not accelerator.races()
    tensor.zero_()
    assert len(accelerator.races()) == 1


def test_an_event_that_has_been_seen_to_have_passed_orders(accelerator: Accelerator) -> None:
    accelerator.configure(1.0)
    host = torch.empty(64, pin_memory=True)
    host.copy_(torch.ones(64, device="cuda"), non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    assert event.query()
    assert host.sum() == 64


def test_pinned_memory_that_is_freed_goes_when_its_copies_are_done(accelerator: Accelerator) -> None:
    host = torch.ones(1 << 16, pin_memory=True)
    pinned = accelerator.pinned_bytes()
    device = torch.empty(1 << 16, device="cuda")
    device.copy_(host, non_blocking=True)
    del host
    assert accelerator.pinned_bytes() == pinned
    assert device.sum().item() == 1 << 16
    torch.empty(1, pin_memory=True)
    assert accelerator.pinned_bytes() < pinned


def test_what_is_freed_is_poisoned_in_the_order_of_its_stream() -> None:
    torch.cuda.empty_cache()
    tensor = torch.ones(5000, device="cuda")
    total = tensor.sum()
    address = tensor.data_ptr()
    del tensor
    again = torch.empty(5000, device="cuda")
    assert again.data_ptr() == address
    assert total.item() == 5000
    assert again.isnan().all().item()


def test_the_end_of_a_large_block_is_not_cut_off() -> None:
    """As torch may leave it where a larger block had become free."""
    for wanted, nbytes in ((1, 512), (MIB - 1, MIB), (MIB, MIB), (MIB + 1, 2 * MIB + 512), (8 * MIB, 9 * MIB)):
        before, torch_before = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["requested_bytes.all.current"]
        tensor = torch.empty(wanted, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() - before == nbytes
        assert torch.cuda.memory_stats()["requested_bytes.all.current"] - torch_before == tensor.nbytes == wanted
        del tensor
        assert torch.cuda.memory_allocated() == before


def test_memory_has_a_capacity(accelerator: Accelerator) -> None:
    torch.cuda.empty_cache()
    accelerator.configure(capacity=torch.cuda.memory_reserved() + accelerator.driver_bytes() + (1 << 20))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first = torch.empty(600 << 10, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(600 << 10, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == first.nbytes == torch.cuda.max_memory_allocated() - before
    del first
    torch.empty(700 << 10, dtype=torch.uint8, device="cuda")  # what was kept has been given back
    assert torch.cuda.memory_stats()["num_alloc_retries"] >= 1


def test_the_host_cannot_read_an_address_of_the_device() -> None:
    program = "import ctypes; from tests.accelerator import cuda; import torch; ctypes.string_at(torch.ones(8, device='cuda').data_ptr(), 4)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGSEGV


def test_the_library_comes_before_torch() -> None:
    program = "import torch; import tests.accelerator.cuda"
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert "has to be loaded before torch" in done.stderr


def test_waits_are_counted_by_thread_and_by_what_for(accelerator: Accelerator) -> None:
    tensor = torch.ones(8, device="cuda")
    pinned = torch.empty(8, pin_memory=True)
    accelerator.waits()
    accelerator.eager_operations()
    pinned.copy_(tensor, non_blocking=True)
    tensor.copy_(pinned, non_blocking=True)
    torch.Stream(device="cuda").wait_stream(torch.accelerator.current_stream())
    tensor.dropout = torch.nn.functional.dropout(tensor)  # type: ignore[attr-defined]
    assert accelerator.waits() == {}
    assert accelerator.eager_operations()["aten::native_dropout"] == 1
    tensor.sum().item()
    tensor.cpu()
    torch.accelerator.synchronize()
    torch.accelerator.current_stream().record_event().synchronize()

    def wait() -> None:
        torch.accelerator.current_stream().synchronize()

    other = threading.Thread(target=wait)
    other.start()
    native_id = other.native_id
    other.join()
    assert native_id is not None
    assert accelerator.waits() == {
        threading.get_native_id(): {"item": 1, "copy_": 1, "device": 1, "event": 1},
        native_id: {"stream": 1},
    }


def test_a_failure_shows_at_the_next_wait_and_at_all_after_it(accelerator: Accelerator) -> None:
    tensor = torch.zeros(8, device="cuda")
    accelerator.fail("aten::mul", after=1)
    tensor.mul_(2)
    tensor.mul_(3)
    tensor.add_(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access was encountered .aten::mul"):
            torch.accelerator.synchronize()
    accelerator.configure()
    assert tensor.sum().item() == 0  # nothing ran after it


def test_a_schedule_is_what_its_seed_makes_it(accelerator: Accelerator) -> None:
    def order(seed: int) -> list[int]:
        accelerator.configure(0.3, seed)
        streams = [torch.Stream(device="cuda") for _ in range(4)]
        pending = []
        for number in range(40):
            with streams[number % 4]:
                torch.ones(number + 1, device="cuda")
            pending.append(accelerator.pending())
        return pending

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_training_has_the_bits_of_the_cpu(schedule: tuple[float, int], accelerator: Accelerator) -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 5))
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for number in range(3):
            tokens = torch.arange(number, number + 8, device=device).view(2, 4)
            loss = nn.functional.cross_entropy(model(tokens).view(8, 5), tokens.view(8) % 5)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    accelerator.configure(*schedule)
    assert all(torch.equal(*pair) for pair in zip(train("cuda"), train("cpu"), strict=True))


def test_random_numbers_come_from_the_state_of_the_device() -> None:
    torch.cuda.manual_seed(3)
    of_cpu = torch.get_rng_state()
    first = torch.rand(4, device="cuda").cpu()
    assert torch.equal(torch.get_rng_state(), of_cpu)
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.rand(4, device="cuda").cpu(), first)


def test_storages_shrink_and_grow(accelerator: Accelerator) -> None:
    tensor = torch.ones(1 << 16, device="cuda")
    before = torch.cuda.memory_allocated()
    accelerator.resize_storage(tensor, 0)
    assert before - torch.cuda.memory_allocated() == 4 << 16
    accelerator.resize_storage(tensor, 4 << 16)
    assert torch.cuda.memory_allocated() == before


# registration


def test_memory_of_the_host_is_registered_and_refused(accelerator: Accelerator) -> None:
    runtime = torch.cuda.cudart()
    tensor = torch.ones(4096)
    place = (tensor.data_ptr(), tensor.nbytes)
    assert runtime.cudaHostRegister(*place, 0) == 0
    assert tensor.is_pinned()
    assert runtime.cudaHostRegister(*place, 0) != 0  # it is already
    with pytest.raises(torch.AcceleratorError, match="of an earlier call"):
        torch.ones(1, device="cuda")
    assert runtime.cudaHostUnregister(place[0]) == 0
    assert not tensor.is_pinned()
    assert runtime.cudaHostUnregister(place[0]) != 0
    accelerator.configure(most_pinned=accelerator.pinned_bytes() + tensor.nbytes - 1)
    assert runtime.cudaHostRegister(*place, 0) == 2
    with pytest.raises(torch.AcceleratorError, match="of an earlier call"):
        torch.ones(1, device="cuda")
    torch.ones(1, device="cuda")


def test_memory_that_is_in_a_copy_is_not_unregistered_unseen(accelerator: Accelerator) -> None:
    tensor = torch.ones(4096)
    torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    torch.empty(4096, device="cuda").copy_(tensor, non_blocking=True)
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
    assert "cudaHostUnregister" in accelerator.races()[0]


@pytest.mark.parametrize("half", [0, 1])
def test_the_host_is_seen_in_each_piece_of_what_it_uses(half: int, accelerator: Accelerator) -> None:
    """Though it may use memory as one that was registered in two pieces."""
    accelerator.configure(0.0)
    runtime, tensor = torch.cuda.cudart(), torch.ones(8192)
    halves = [(tensor.data_ptr() + offset, tensor.nbytes // 2) for offset in (0, tensor.nbytes // 2)]
    assert [runtime.cudaHostRegister(*each, 0) for each in halves] == [0, 0]
    tensor[half * 4096 : (half + 1) * 4096].copy_(torch.zeros(4096, device="cuda"), non_blocking=True)
    assert not accelerator.races()
    tensor.add_(1)
    (race,) = accelerator.races()
    assert "aten::add_" in race
    torch.accelerator.synchronize()
    assert [runtime.cudaHostUnregister(address) for address, _ in halves] == [0, 0]


def test_a_copy_of_memory_that_was_registered_in_two_pieces_fails() -> None:
    runtime, tensor = torch.cuda.cudart(), torch.ones(8192)
    halves = [(tensor.data_ptr() + offset, tensor.nbytes // 2) for offset in (0, tensor.nbytes // 2)]
    assert [runtime.cudaHostRegister(*half, 0) for half in halves] == [0, 0]
    with pytest.raises(RuntimeError, match="goes beyond"):
        torch.empty(8192, device="cuda").copy_(tensor, non_blocking=True)
    assert [runtime.cudaHostUnregister(address) for address, _ in halves] == [0, 0]


# the driver's virtual memory


@pytest.fixture
def addresses() -> Iterator[DeviceAddresses]:
    """Two granules of addresses, of which the first has memory."""
    made = DeviceAddresses(2 * GRANULE, device=0)
    made.map(0, GRANULE)
    yield made
    torch.accelerator.synchronize()
    made.close()


def test_memory_is_mapped_at_addresses_that_were_reserved(addresses: DeviceAddresses, accelerator: Accelerator) -> None:
    before = accelerator.driver_bytes() - GRANULE
    tensor = over(addresses.start, 16)
    assert tensor.isnan().all().item()
    assert tensor.fill_(2).sum().item() == 32
    torch.accelerator.synchronize()
    addresses.unmap(0)
    assert accelerator.driver_bytes() == before


def test_addresses_without_memory_are_not_used_unseen(addresses: DeviceAddresses) -> None:
    with pytest.raises(RuntimeError, match="addresses that have no memory"):
        over(addresses.start + GRANULE - 4, 2).zero_()
    with pytest.raises(RuntimeError, match="addresses that have no memory"):
        over(addresses.start + GRANULE, 1).sum()


def test_memory_that_is_in_use_is_not_unmapped_unseen(addresses: DeviceAddresses, accelerator: Accelerator) -> None:
    accelerator.configure(1.0)
    over(addresses.start, 16).zero_()
    addresses.unmap(0)
    assert "cuMemUnmap" in accelerator.races()[0]


@pytest.mark.parametrize("waits", [False, True])
def test_memory_at_two_addresses_is_one(waits: bool, addresses: DeviceAddresses, accelerator: Accelerator) -> None:
    """Of works by either address, one that writes has to be ordered with the others; each address goes by itself, the memory with the last."""
    accelerator.configure(1.0)
    before, address = accelerator.driver_bytes() - GRANULE, addresses.start
    addresses.map_also(GRANULE, of=0)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        over(address, 16).fill_(3)
        written = first.record_event()
    with torch.cuda.stream(second):
        if waits:
            second.wait_event(written)
        total = over(address + GRANULE, 16).sum()
    torch.accelerator.synchronize()
    races = accelerator.races()
    assert bool(races) == (not waits)
    assert all("by another address" in race for race in races)
    assert total.item() == 48 or not waits
    with torch.cuda.stream(second):
        over(address + GRANULE, 16).fill_(4)
    addresses.unmap(0)  # what is under way uses the other address
    assert not accelerator.races()
    assert accelerator.driver_bytes() == before + GRANULE
    torch.accelerator.synchronize()
    addresses.unmap(GRANULE)
    assert accelerator.driver_bytes() == before


def test_the_driver_shares_the_capacity_with_torch(accelerator: Accelerator) -> None:
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    accelerator.configure(capacity=reserved + accelerator.driver_bytes() + 3 * GRANULE)
    tensor = torch.empty(GRANULE // 2, dtype=torch.uint8, device="cuda")
    made = DeviceAddresses(3 * GRANULE, device=0)
    for at in (0, GRANULE):
        made.map(at, GRANULE)
    with pytest.raises(DeviceError, match="no memory left"):
        made.map(2 * GRANULE, GRANULE)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(GRANULE // 2 + 1, dtype=torch.uint8, device="cuda")
    made.close()
    assert torch.cuda.mem_get_info()[0] == 2 * GRANULE + GRANULE // 2
    del tensor


@pytest.mark.parametrize(
    ("at", "nbytes", "why"),
    [
        (GRANULE, 1000, "cannot be taken"),
        (0, GRANULE, "cannot be mapped"),  # there is memory
        (512, GRANULE, "cannot be mapped"),
        (GRANULE, 2 * GRANULE, "cannot be mapped"),  # beyond what was reserved
    ],
)
def test_the_driver_refuses_what_makes_no_sense(at: int, nbytes: int, why: str, addresses: DeviceAddresses) -> None:
    with pytest.raises(DeviceError, match=why):
        addresses.map(at, nbytes)


def test_shapes_that_are_kept_are_those_of_the_very_call() -> None:
    calls = [
        lambda m: m * 2,
        lambda m: m * 2.0,
        lambda m: m.t() * 2,
        lambda m: m.double() * 2,
        lambda m: m.sum(0),
        lambda m: m.sum(1),
        lambda m: torch.cat([m, m]),
        lambda m: torch.cat([m, m, m]),
    ]
    for call in calls * 2:
        want, got = call(torch.arange(12).view(3, 4)), call(torch.arange(12, device="cuda").view(3, 4))
        assert (want.dtype, want.stride(), want.tolist()) == (got.dtype, got.stride(), got.tolist())
