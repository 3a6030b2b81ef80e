"""memory/space.py, driver.py: slots on a device, and slots of the host that it copies by itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from patrickstar.errors import DeviceError, StateError
from patrickstar.memory import driver
from patrickstar.memory.arena import Arena
from patrickstar.memory.space import DeviceSpace, PinnedSpace
from patrickstar.memory.stream_lane import StreamTicket
from patrickstar.units import MIB
from tests.cuda.schedules import FEW_SCHEDULES, Accelerator
from tests.forked import in_forked_child

CUDA = torch.device("cuda", 0)
GRANULE = 2 * MIB
SIZES = [4096, MIB, GRANULE, 3 * MIB, 2 * GRANULE]


def on_device(slot_bytes: int, slots: int = 12) -> Arena:
    return Arena(slot_bytes, virtual_slots=slots, name="device", make_space=partial(DeviceSpace, device=CUDA))


def pinned(slot_bytes: int, slots: int = 12) -> Arena:
    return Arena(slot_bytes, virtual_slots=slots, name="host", make_space=PinnedSpace)


@pytest.fixture(params=FEW_SCHEDULES, ids=str)
def accelerator(accelerator: Accelerator) -> Iterator[Accelerator]:
    before = accelerator.driver_bytes()  # a session that a failure of the device has ended keeps its own
    yield accelerator
    assert accelerator.driver_bytes() == before


@pytest.mark.parametrize("slot_bytes", SIZES)
def test_bytes_go_to_the_device_and_back(slot_bytes: int, accelerator: Accelerator) -> None:
    host, device = pinned(slot_bytes), on_device(slot_bytes)
    there, here, back = host.take(2), device.take(2), host.take(2)
    numbers = torch.arange(2 * slot_bytes // 4, dtype=torch.int32)
    host.wrapping(there, 2, torch.int32)().copy_(numbers)
    accelerator.waits()
    device.copying(here, 2, host, there)()
    device.wrapping(here, 2, torch.int32)().add_(1)
    host.copying(back, 2, device, here)()
    assert not accelerator.waits()
    torch.accelerator.synchronize()
    assert torch.equal(host.wrapping(back, 2, torch.int32)(), numbers + 1)
    host.close()
    device.close()


def test_what_is_first_filled_in_inference_mode_is_written_later_too(accelerator: Accelerator) -> None:
    """The tensor over it, which is made once, belongs to no mode."""
    arena = on_device(GRANULE)
    slot = arena.take(1)
    with torch.inference_mode():
        arena.filling(slot, 1)()
    arena.filling(slot, 1)()
    torch.accelerator.synchronize()
    arena.close()


@pytest.mark.parametrize("slot_bytes", SIZES)
def test_slots_have_memory_from_their_first_use_until_they_are_trimmed(
    slot_bytes: int, accelerator: Accelerator
) -> None:
    arena = on_device(slot_bytes, slots=9)
    before = accelerator.driver_bytes()
    first = arena.take(9)
    most = accelerator.driver_bytes() - before
    assert most == -(-9 * slot_bytes // GRANULE) * GRANULE if slot_bytes % GRANULE else most == 9 * slot_bytes
    arena.filling(first, 9)()
    torch.accelerator.synchronize()
    arena.give(first, 4)
    assert accelerator.driver_bytes() - before == most
    arena.trim(5)
    kept = accelerator.driver_bytes() - before
    assert 5 * slot_bytes <= kept < 5 * slot_bytes + 2 * GRANULE
    again = arena.take(4)
    assert accelerator.driver_bytes() - before == most
    assert arena.wrapping(again, 4, torch.uint8)().fill_(3).sum().item() == 12 * slot_bytes
    arena.give(first, 9)
    torch.accelerator.synchronize()
    arena.close()


def test_slots_are_filled_and_poisoned_on_the_device(accelerator: Accelerator) -> None:
    arena = on_device(GRANULE)
    first = arena.take(2)
    floats = arena.wrapping(first, 2, torch.float32)()
    arena.filling(first, 2)()
    assert not floats.any().item()
    arena.filling(first, 2, poison=True)()
    assert floats.isnan().all().item()
    arena.close()


def test_each_wrapping_has_a_storage_of_its_own(accelerator: Accelerator) -> None:
    arena = on_device(4096)
    wrap = arena.wrapping(arena.take(), 1, torch.bfloat16)
    first, second = wrap(), wrap()
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert (first.data_ptr(), first.numel(), first.dtype, first.device) == (
        second.data_ptr(),
        2048,
        torch.bfloat16,
        CUDA,
    )
    arena.close()


def test_a_device_that_is_full_is_an_error_that_changes_nothing(accelerator: Accelerator) -> None:
    torch.accelerator.empty_cache()  # of which the arena would take
    before = accelerator.driver_bytes()
    accelerator.configure(capacity=torch.cuda.memory_reserved() + before + 5 * GRANULE)
    arena = on_device(GRANULE)
    arena.take(2)
    with pytest.raises(DeviceError, match=r"no memory left for a slot of 2\.00 MiB: of .* are free"):
        arena.take(4)
    assert (arena._slots.in_use, accelerator.driver_bytes() - before) == (2, 5 * GRANULE)
    arena.take(3, max_committed_slots=5)  # of what had come before the error, or in its place
    arena.close()


def late_writes(device: Arena, slots: list[int], value: int) -> StreamTicket:
    """Writes into slots on a stream of their own, and what ends when they have ended. Each look at it lets one of them end."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for slot in 10 * slots:
            device.wrapping(slot, 1, torch.uint8)().fill_(value)
        return StreamTicket(stream)


def given_back_apart(device: Arena, count: int) -> tuple[list[int], StreamTicket]:
    """Slots, each second of which is given back while something writes into all of them until the ticket ends."""
    slots = [device.take() for _ in range(count)]
    fence = late_writes(device, slots, 7)
    for slot in slots[::2]:
        device.give(slot, fence=fence)
    return slots, fence


@pytest.mark.parametrize("comes_after", [True, False])
def test_memory_goes_from_slots_apart_to_slots_side_by_side_without_a_wait(
    comes_after: bool, accelerator: Accelerator
) -> None:
    """With what may still be under way on it: whoever writes there, by other addresses, has to come after that."""
    device = on_device(GRANULE)
    single, fence = given_back_apart(device, 4)
    before = accelerator.driver_bytes()
    accelerator.waits()
    pair = device.take(2, max_committed_slots=4)
    assert not accelerator.waits()
    assert accelerator.driver_bytes() == before
    assert (device.committed_slots, device._slots.in_use) == (4, 4)
    found = device.fences(pair, 2)
    assert found in ([fence], [])  # []: it was over
    if comes_after:
        for each in found:
            each.wait_on_device()
    device.wrapping(pair, 2, torch.uint8)().fill_(9)
    torch.accelerator.synchronize()
    assert bool(accelerator.races()) == (bool(found) and not comes_after)
    assert [int(device.wrapping(slot, 1, torch.uint8)()[5]) for slot in (single[1], single[3])] == [7, 7]
    if comes_after:
        assert bool((device.wrapping(pair, 2, torch.uint8)() == 9).all())
    # The addresses that had the memory come back when nothing uses them any more.
    other = [device.take(), device.take()]
    assert set(single[::2]).isdisjoint({pair, pair + 1})
    for slot in (*single[1::2], pair, pair + 1, *other):
        device.give(slot)
    device.trim(0)
    assert accelerator.driver_bytes() == before - 4 * GRANULE
    device.close()
    accelerator.races()


def test_more_memory_than_is_needed_side_by_side_is_waited_for(accelerator: Accelerator) -> None:
    """The bound holds at once."""
    device = on_device(GRANULE)
    single, fence = given_back_apart(device, 6)
    before = accelerator.driver_bytes()
    pair = device.take(2, max_committed_slots=5)
    assert accelerator.driver_bytes() == before - GRANULE
    assert (device.committed_slots, device._slots.in_use) == (5, 5)
    for slot in (*single[1::2], pair, pair + 1):
        device.give(slot)
    device.close()


def test_slots_that_share_what_the_driver_maps_lend_nothing(accelerator: Accelerator) -> None:
    device = on_device(3 * MIB)
    single, fence = given_back_apart(device, 4)
    pair = device.take(2, max_committed_slots=4)
    assert fence.done
    for slot in (*single[1::2], pair, pair + 1):
        device.give(slot)
    device.close()


def test_trimming_waits_for_what_is_under_way(accelerator: Accelerator) -> None:
    arena = on_device(GRANULE)
    first = arena.take()
    arena.filling(first, 1)()
    arena.give(first, fence=StreamTicket(torch.accelerator.current_stream()))
    arena.trim(0)
    arena.close()


def test_memory_of_the_host_is_pinned_while_it_is_used_and_no_more_than_that(accelerator: Accelerator) -> None:
    before = accelerator.pinned_bytes()
    arena = pinned(5 * 4096)
    assert accelerator.pinned_bytes() == before
    first = arena.take(3)
    assert accelerator.pinned_bytes() - before == 3 * arena.slot_bytes
    assert arena.wrapping(first, 1, torch.uint8)().is_pinned()
    arena.give(first, 2)
    arena.trim(1)
    assert accelerator.pinned_bytes() - before == arena.slot_bytes
    arena.take(2)
    assert accelerator.pinned_bytes() - before == 3 * arena.slot_bytes
    arena.close()
    assert accelerator.pinned_bytes() == before


@pytest.mark.parametrize("units", [0, 2])
def test_where_pinning_is_refused_memory_is_pageable_and_a_warning_says_what_that_costs(
    units: int, accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    before = accelerator.pinned_bytes()
    accelerator.configure(most_pinned=before + units * 4096)
    host, device = pinned(4096), on_device(4096)
    with caplog.at_level(logging.WARNING, logger="patrickstar"):
        there, here = host.take(3), device.take(3)
    (record,) = caplog.records
    assert accelerator.pinned_bytes() - before == units * 4096
    assert f"pins no more than {units * 4096} bytes" in record.getMessage()
    assert "two to three times as long" in record.getMessage()
    host.wrapping(there, 3, torch.uint8)().fill_(7)
    device.copying(here, 3, host, there)()
    assert device.wrapping(here, 3, torch.uint8)().sum().item() == 7 * 3 * 4096
    host.close()
    device.close()


def test_a_forked_child_may_not_use_the_device(accelerator: Accelerator) -> None:
    arena = on_device(4096)
    first = arena.take()

    def use() -> str:
        with pytest.raises(StateError, match="CUDA cannot be used") as refusal:
            arena.take()
        arena.close()
        return str(refusal.value)

    assert "spawn" in in_forked_child(use)
    arena.give(first)
    arena.close()
    with pytest.raises(StateError, match="closed"):
        arena.take()


def test_a_driver_that_is_not_there_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        pass

    monkeypatch.setattr(driver, "_driver", Old)
    with pytest.raises(DeviceError, match=r"too old: it has no cuMemAddressReserve; CUDA 11\.4"):
        driver.DeviceAddresses(GRANULE, device=0)
    monkeypatch.undo()


def test_addresses_are_given_back(accelerator: Accelerator) -> None:
    before = accelerator.driver_bytes()
    addresses = driver.DeviceAddresses(3 * GRANULE + 1, device=0)
    assert addresses.nbytes == 4 * GRANULE
    addresses.map(GRANULE, 2 * GRANULE)
    assert addresses.mapped_bytes == 2 * GRANULE == accelerator.driver_bytes() - before
    addresses.close()
    addresses.close()
    assert accelerator.driver_bytes() == before


def test_memory_of_a_closed_arena_goes_with_the_last_tensor_over_it(accelerator: Accelerator) -> None:
    before = accelerator.driver_bytes()
    arena = on_device(GRANULE)
    tensors = [arena.wrapping(arena.take(), 1, torch.uint8)().fill_(number) for number in range(2)]
    arena.close([tensor.untyped_storage() for tensor in tensors])
    assert accelerator.driver_bytes() - before == 2 * GRANULE
    assert tensors.pop().sum().item() == GRANULE
    assert accelerator.driver_bytes() - before == 2 * GRANULE
    tensors.clear()
    assert accelerator.driver_bytes() == before


def test_memory_of_a_closed_arena_stays_until_what_is_queued_has_used_it(accelerator: Accelerator) -> None:
    arena = on_device(GRANULE)
    tensor = arena.wrapping(arena.take(), 1, torch.uint8)().fill_(3)
    arena.close([tensor.untyped_storage()])
    total = tensor.sum()
    del tensor
    assert total.item() == 3 * GRANULE


def test_an_arena_that_is_closed_while_slots_are_in_use_gives_all_its_memory_back(accelerator: Accelerator) -> None:
    before = accelerator.driver_bytes()
    arena = on_device(GRANULE)
    arena.take(3)
    arena.close()
    assert accelerator.driver_bytes() == before


def test_a_refusal_to_pin_leaves_no_error_to_the_next_kernel(accelerator: Accelerator) -> None:
    accelerator.configure(0.3, 1, most_pinned=0)
    space = PinnedSpace(1 << 20, unit_bytes=4096, name="host")
    space.prepare(0, 4096)
    assert torch.ones(1, device="cuda").cpu().item() == 1
    space.close()
