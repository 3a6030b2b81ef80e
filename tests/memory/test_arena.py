"""memory/arena.py: what is resident is what is committed, and a tensor over a slot outlives everything."""

from __future__ import annotations

import ctypes
import os
import weakref

import pytest
import torch

from patrickstar.errors import DeviceError, StateError
from patrickstar.memory.arena import Arena
from patrickstar.memory.lanes import DONE
from patrickstar.memory.mapping import HUGE_PAGE_BYTES, reserve
from patrickstar.memory.process import resident_bytes
from patrickstar.units import KIB, MIB
from tests.forked import in_forked_child
from tests.manual_lane import ManualLane

# Odd multiples of 8 KiB too: the layout gives such slots, and they share huge pages.
SLOT_BYTES = pytest.mark.parametrize("slot_bytes", [4 * MIB, 5 * MIB, 3 * MIB + 8 * KIB, MIB + 8 * KIB])
TOLERANCE = 256 * KIB  # what else the process may touch, and the kernel's per-processor counters


@pytest.fixture(autouse=True, scope="module")
def warmed_up():
    """What a first use leaves behind (thread pools, code pages) is no growth of an arena."""
    host = Arena(4 * MIB, virtual_slots=4, name="host")
    touch(host, host.take(4), 4)
    assert host.wrapping(0, 4, torch.float32)().eq(1.0).all()


def arena(slot_bytes: int = 8 * KIB, virtual_slots: int = 32) -> Arena:
    return Arena(slot_bytes, virtual_slots=virtual_slots, name="host")


def touch(arena: Arena, first: int, n: int = 1) -> None:
    arena.wrapping(first, n, torch.float32)().fill_(1.0)


class Growth:
    """Resident bytes since it was made."""

    def __init__(self) -> None:
        self.base = resident_bytes()

    def __eq__(self, expected: object) -> bool:
        assert isinstance(expected, int)
        return abs(resident_bytes() - self.base - expected) <= TOLERANCE

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"growth of {resident_bytes() - self.base}"


@SLOT_BYTES
def test_resident_is_what_was_touched_and_never_a_neighbour(slot_bytes):
    host = arena(slot_bytes)
    growth = Growth()
    slots = [host.take() for _ in range(12)]
    assert growth == 0
    for slot in slots[::2]:
        touch(host, slot)
    assert growth == 6 * slot_bytes
    assert host._slots.in_use == host.committed_slots == 12


@SLOT_BYTES
def test_trim_gives_the_pages_of_free_slots_back_at_once(slot_bytes):
    host = arena(slot_bytes)
    growth = Growth()
    slots = [host.take() for _ in range(12)]
    for slot in slots:
        touch(host, slot)
    for slot in slots[::2]:
        host.give(slot)
    assert growth == 12 * slot_bytes  # warm until trimmed
    host.trim(8)
    assert growth == 8 * slot_bytes
    assert (host._slots.in_use, host.committed_slots) == (6, 8)
    host.trim(0)
    assert growth == 6 * slot_bytes
    for slot in slots[1::2]:
        assert host.wrapping(slot, 1, torch.float32)().eq(1.0).all()


def test_a_trimmed_slot_reads_as_zeros_and_a_warm_one_as_it_was_left():
    host = arena()
    warm, cold = host.take(), host.take()
    touch(host, warm)
    touch(host, cold)
    host.give(cold)
    host.trim(1)
    host.give(warm)
    assert host.wrapping(cold, 1, torch.float32)().eq(0.0).all()
    assert host.wrapping(warm, 1, torch.float32)().eq(1.0).all()


def test_a_run_of_slots_is_one_tensor():
    host = arena()
    first = host.take(3)
    whole = host.wrapping(first, 3, torch.float32)()
    whole.copy_(torch.arange(whole.numel()))
    pieces = [host.wrapping(first + i, 1, torch.float32)() for i in range(3)]
    assert torch.equal(torch.cat(pieces), whole)
    assert whole.numel() == 3 * host.slot_bytes // 4
    assert host.wrapping(first, 1, torch.bfloat16)().numel() == host.slot_bytes // 2


def test_every_tensor_has_a_storage_of_its_own_over_the_same_bytes():
    host = arena()
    slot = host.take()
    one, other = host.wrapping(slot, 1, torch.float32)(), host.wrapping(slot, 1, torch.float32)()
    one.fill_(7.0)
    assert other.eq(7.0).all()
    ended = []
    weakref.finalize(one.untyped_storage(), ended.append, True)
    view = one[3:5]
    del one
    assert not ended
    del view
    assert ended


def test_slots_lie_at_their_addresses():
    host = arena(slot_bytes=12 * KIB)
    start = host.space._start
    first = host.take(2)
    tensor = host.wrapping(first, 2, torch.float32)()
    assert start % HUGE_PAGE_BYTES == 0
    assert tensor.data_ptr() == start + first * 12 * KIB


def test_a_buffer_is_the_bytes_of_its_slots():
    host = arena()
    first = host.take(2)
    buffer = host.buffer(first, 2)
    buffer[:] = bytes([7]) * len(buffer)
    assert len(buffer) == 2 * host.slot_bytes
    assert host.wrapping(first, 2, torch.uint8)().eq(7).all()


def test_poison_is_nan_in_every_floating_type_and_stays_in_its_slots():
    host = arena()
    slots = [host.take() for _ in range(3)]
    for slot in slots:
        touch(host, slot)
    host.filling(slots[1], 1, poison=True)()
    host.give(slots[1])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert host.wrapping(slots[1], 1, dtype)().isnan().all()
    assert host.wrapping(slots[0], 1, torch.float32)().eq(1.0).all()
    assert host.wrapping(slots[2], 1, torch.float32)().eq(1.0).all()


def test_the_memory_goes_with_the_last_tensor_after_close():
    growth = Growth()
    host = arena(4 * MIB)
    kept, gone = host.take(), host.take()
    touch(host, kept)
    touch(host, gone)
    host.give(gone)
    view = host.wrapping(kept, 1, torch.float32)()[:10]
    host.close()
    host.close()
    del host
    assert growth == 4 * MIB  # the free slot's pages went at once
    assert view.eq(1.0).all()
    del view
    assert growth == 0


def test_a_closed_arena_says_so():
    host = arena()
    slot = host.take()
    host.close()
    for call in (host.take, lambda: host.buffer(slot), lambda: host.wrapping(slot, 1, torch.float32)()):
        with pytest.raises(StateError, match="host arena is closed"):
            call()
    host.filling(slot, 1, poison=True)()  # what ends late still ends
    host.give(slot)


def test_slots_that_are_given_back_early_have_a_fence_until_the_works_on_them_are_over():
    host, lane = arena(), ManualLane()
    first = host.take(2)
    fence = lane.issue(host.filling(first, 2, poison=True))
    host.give(first, 2, fence=fence)
    host.give(host.take(), fence=DONE)
    again = host.take(2)
    while again != first:
        host.give(again, 2)
        again = host.take(2)
    assert host.fences(first, 2) == [fence]
    fence.wait()
    assert host.fences(first, 2) == []


def test_pages_go_back_when_the_works_on_them_are_over():
    host, lane = arena(), ManualLane()
    slot = host.take()
    host.give(slot, fence=lane.issue(host.filling(slot, 1, poison=True)))
    host.trim(0)
    assert lane.pending == 0
    host.close()


def test_a_trim_that_is_interrupted_while_it_waits_leaves_the_work_to_whoever_takes_the_slots():
    class Interrupted(ManualLane):
        def wait_for(self, ticket):
            raise KeyboardInterrupt

    host, lane = arena(), Interrupted()
    slot = host.take()
    late = lane.issue(host.filling(slot, 1, poison=True))
    host.give(slot, fence=late)
    with pytest.raises(KeyboardInterrupt):
        host.trim(0)
    assert host.fences(slot) == [late]
    lane.complete()
    host.close()


def test_slots_are_copied_from_arena_to_arena():
    source, target = arena(), arena()
    from_, to = source.take(3), target.take(3)
    source.wrapping(from_, 3, torch.float32)().copy_(torch.arange(3 * source.slot_bytes // 4))
    target.filling(to, 3)()
    target.copying(to + 1, 2, source, from_)()
    got = target.wrapping(to, 3, torch.float32)()
    assert got[: target.slot_bytes // 4].eq(0).all()
    assert got[target.slot_bytes // 4 :].equal(torch.arange(2 * source.slot_bytes // 4, dtype=torch.float32))


@pytest.mark.parametrize("slot_bytes", [0, -4096, 4095, 6 * KIB])
def test_slots_are_whole_blocks(slot_bytes):
    with pytest.raises(ValueError, match="multiple of 4096"):
        arena(slot_bytes)


@pytest.mark.parametrize(("first", "n"), [(-1, 1), (31, 2), (32, 1), (0, 0)])
def test_slots_beyond_the_arena_are_refused(first, n):
    host = arena()
    with pytest.raises(IndexError):
        host.buffer(first, n)
    with pytest.raises(IndexError):
        host.wrapping(first, n, torch.float32)()


def test_address_space_that_cannot_be_had_is_an_error_that_says_what_to_do():
    with pytest.raises(DeviceError, match="ulimit -v"):
        reserve(1 << 60)


def test_a_forked_child_is_told_and_does_not_disturb_the_parent():
    host = arena()
    slot = host.take()
    touch(host, slot)

    def use_and_end() -> str:
        nonlocal host
        with pytest.raises(StateError) as refusal:
            host.wrapping(slot, 1, torch.float32)()
        said = str(refusal.value)
        del refusal
        # The range is free in the child, so its own memory may come to lie there; it must outlive the arena's end.
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        start = host.space._start
        own = libc.mmap(ctypes.c_void_p(start), ctypes.c_size_t(4 * KIB), 3, 0x22, -1, ctypes.c_long(0))
        host.close()
        del host
        ctypes.memset(own, 1, 4 * KIB)
        return said + " took its place" if own == start else said

    message = in_forked_child(use_and_end)
    assert f"belongs to process {os.getpid()}" in message
    assert message.endswith("took its place")
    assert host.wrapping(slot, 1, torch.float32)().eq(1.0).all()
