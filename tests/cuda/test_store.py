"""memory/store.py on a device: what an action leaves under way, the next one that needs it comes after."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from patrickstar.core.ledger import Ledger
from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Touch
from patrickstar.memory.arena import Arena
from patrickstar.memory.device_space import DeviceSpace
from patrickstar.memory.links import Links, lanes_of
from patrickstar.memory.pinned_space import PinnedSpace
from patrickstar.memory.store import ChunkStore
from patrickstar.plan.actions import Copy, Create, Drop, Update, UpdateWait, Wait
from patrickstar.plan.residency import Residency
from patrickstar.plan.snapshot import Snapshot
from tests.cuda.schedules import SCHEDULES

if TYPE_CHECKING:
    from tests.accelerator.cuda import Accelerator

CUDA = torch.device("cuda", 0)
D, H = Tier.DEVICE, Tier.HOST
ONE, OTHER = PlaneRef(0, "weight"), PlaneRef(1, "weight")
SLOT_BYTES = 4096


@pytest.fixture(params=SCHEDULES, ids=str)
def accelerator(request: pytest.FixtureRequest, accelerator: Accelerator) -> Accelerator:
    accelerator.configure(*request.param)
    return accelerator


@pytest.fixture
def store(accelerator: Accelerator) -> ChunkStore:
    """Two units that rest on the host without contents, and room for both of them on the device."""
    state = Residency.of(Snapshot(D, SLOT_BYTES, {ONE: H, OTHER: H}, {ONE: 1, OTHER: 1}, newest={}, taken={}))
    ledger = Ledger()
    ledger.add(H, 2 * SLOT_BYTES)
    return ChunkStore(
        state,
        arenas={
            D: Arena(SLOT_BYTES, virtual_slots=3, name="device", make_space=partial(DeviceSpace, device=CUDA)),
            H: Arena(SLOT_BYTES, virtual_slots=2, name="host", make_space=PinnedSpace),
        },
        disk=None,
        links=Links(lanes_of(device=CUDA)),
        dtype=lambda _: torch.float32,
        chunks=lambda _: 1,
        ledger=ledger,
        device=CUDA,
    )


def use(store: ChunkStore, ref: PlaneRef, *, writes: bool = False) -> torch.Tensor:
    """A unit on the device, ready for the current stream."""
    store.compute([Touch(ref, writes)])
    if writes:
        store.wrote(ref)
    return store.tensor(ref)


def finish(store: ChunkStore, accelerator: Accelerator) -> None:
    store.close()
    assert not accelerator.races()


def test_a_unit_comes_and_goes_and_nobody_waits(store: ChunkStore, accelerator: Accelerator) -> None:
    store.carry_out([Create(ONE, D), Create(OTHER, D)])
    use(store, ONE, writes=True).fill_(3)
    use(store, OTHER, writes=True).fill_(4)
    accelerator.waits()
    for _ in range(3):
        store.carry_out([Copy(ONE, D, H), Wait(ONE, H), Drop(ONE, D)])
        store.carry_out([Copy(OTHER, D, H), Wait(OTHER, H), Drop(OTHER, D)])
        # Into each other's place.
        store.carry_out([Copy(OTHER, H, D), Wait(OTHER, D)])
        store.carry_out([Copy(ONE, H, D), Wait(ONE, D)])
        use(store, ONE, writes=True).add_(1)
        use(store, OTHER, writes=True).add_(1)
    assert not accelerator.waits()
    assert [use(store, ref).sum().item() for ref in (ONE, OTHER)] == [6 * 1024, 7 * 1024]
    finish(store, accelerator)


def test_a_copy_comes_after_the_one_that_brought_its_source(store: ChunkStore, accelerator: Accelerator) -> None:
    store.carry_out([Create(ONE, D)])
    use(store, ONE, writes=True).fill_(3)
    store.carry_out([Copy(ONE, D, H), Wait(ONE, H), Drop(ONE, D)])
    # Not into the slot that has the first copy behind it.
    store.carry_out([Create(OTHER, D), Copy(ONE, H, D), Wait(ONE, D)])
    assert use(store, ONE).sum().item() == 3 * 1024
    finish(store, accelerator)


def test_a_unit_that_is_updated_is_used_after_that(store: ChunkStore, accelerator: Accelerator) -> None:
    store.carry_out([Create(ONE, D)])
    use(store, ONE, writes=True).fill_(3)
    operand = store.operand(ONE, D)
    store.update_work = lambda chunk, tier: lambda: operand.mul_(2)
    store.carry_out([Update(0, D), UpdateWait(0, D)])
    assert use(store, ONE).sum().item() == 6 * 1024
    store.carry_out([Update(0, D), UpdateWait(0, D), Copy(ONE, D, H), Wait(ONE, H)])
    assert store.tensor(ONE, H).sum() == 12 * 1024
    finish(store, accelerator)


def test_the_host_updates_what_has_come_down_and_it_goes_up_after_that(
    store: ChunkStore, accelerator: Accelerator
) -> None:
    store.carry_out([Create(ONE, D)])
    use(store, ONE, writes=True).fill_(3)
    store.carry_out([Copy(ONE, D, H), Wait(ONE, H), Drop(ONE, D)])
    operand = store.operand(ONE, H)
    store.update_work = lambda chunk, tier: lambda: operand.mul_(2)
    store.carry_out([Update(0, H), UpdateWait(0, H), Copy(ONE, H, D), Wait(ONE, D)])
    assert use(store, ONE).sum().item() == 6 * 1024
    finish(store, accelerator)


def test_new_contents_are_zeros_whatever_was_there(store: ChunkStore, accelerator: Accelerator) -> None:
    for number in range(3):
        store.carry_out([Create(ONE, D)])
        assert not use(store, ONE).any().item()
        use(store, ONE, writes=True).fill_(number)
        use(store, ONE).sum()
        store.release(ONE)
    finish(store, accelerator)
