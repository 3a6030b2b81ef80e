"""memory/store.py on a device: what an action leaves under way, the next one that needs it comes after."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Touch
from patrickstar.memory.arena import Arena
from patrickstar.memory.disk import DiskPool
from patrickstar.memory.lanes import Task
from patrickstar.memory.space import DeviceSpace, PinnedSpace
from patrickstar.memory.store import ChunkStore
from patrickstar.memory.works_under_way import lanes_of
from patrickstar.plan.actions import Drop, Issue, Wait, Work
from tests.cuda.schedules import SCHEDULES, Accelerator, under
from tests.memory.stores import SLOT_BYTES, store_of

CUDA = torch.device("cuda", 0)
D, H, K = Tier.DEVICE, Tier.HOST, Tier.DISK
ONE, OTHER = PlaneRef(0, "weight"), PlaneRef(1, "weight")
RUN = PlaneRef(3, "weight")
NUMEL = SLOT_BYTES // 4


accelerator = under(SCHEDULES)


def make_store(
    home: dict[PlaneRef, Tier], *, slots: int = 1, host_slots: int | None = None, disk: DiskPool | None = None
) -> ChunkStore:
    """Units of so many chunks, of a slot each, without contents; the device has room for three slots, or for one unit."""
    arenas = {
        D: Arena(SLOT_BYTES, virtual_slots=3, name="device", make_space=partial(DeviceSpace, device=CUDA)),
        H: Arena(SLOT_BYTES, virtual_slots=host_slots or 2 * slots, name="host", make_space=PinnedSpace),
    }
    make_lane = lanes_of(device=CUDA)
    return store_of(home, dict.fromkeys(home, slots), arenas=arenas, make_lane=make_lane, disk=disk, device=CUDA)


@pytest.fixture
def store(accelerator: Accelerator) -> ChunkStore:
    """Two units that rest on the host, and room for both of them on the device."""
    return make_store({ONE: H, OTHER: H})


@pytest.fixture
def passing(accelerator: Accelerator, tmp_path: Path) -> ChunkStore:
    """Two units that rest on the disk and come to the device, which has room for both, through a single slot of the host."""
    pool = DiskPool(tmp_path, units=dict.fromkeys((ONE, OTHER), SLOT_BYTES), budget_bytes=2 * SLOT_BYTES)
    return make_store({ONE: K, OTHER: K}, host_slots=1, disk=pool)


@pytest.fixture
def runs(accelerator: Accelerator) -> ChunkStore:
    """Two runs of three chunks that rest on the host, and room for one of them on the device. An update doubles a chunk of the first."""
    return make_store({ONE: H, RUN: H}, slots=3)


def doubling(store: ChunkStore) -> Callable[[int, Tier], Task]:
    """Updates that double a chunk of the first unit, each a slot of it."""

    def work(chunk: int, tier: Tier) -> Task:
        part = store.operand(ONE, tier)[chunk * NUMEL : (chunk + 1) * NUMEL]
        return lambda: part.mul_(2)

    return work


def use(store: ChunkStore, ref: PlaneRef, *, writes: bool = False) -> torch.Tensor:
    """A unit on the device, ready for the current stream."""
    store.works.compute([Touch(ref, writes)])
    if writes:
        store.wrote(ref)
    return store.tensor(ref)


def test_a_unit_comes_and_goes_and_nobody_waits(store: ChunkStore, accelerator: Accelerator) -> None:
    store.carry_out([Issue.create(ONE, D), Issue.create(OTHER, D)])
    use(store, ONE, writes=True).fill_(3)
    use(store, OTHER, writes=True).fill_(4)
    accelerator.waits()
    for _ in range(3):
        store.carry_out([Issue.copy(ONE, D, H), Wait.copy(ONE, H), Drop(ONE, D)])
        store.carry_out([Issue.copy(OTHER, D, H), Wait.copy(OTHER, H), Drop(OTHER, D)])
        # Into each other's place.
        store.carry_out([Issue.copy(OTHER, H, D), Wait.copy(OTHER, D)])
        store.carry_out([Issue.copy(ONE, H, D), Wait.copy(ONE, D)])
        use(store, ONE, writes=True).add_(1)
        use(store, OTHER, writes=True).add_(1)
    assert not accelerator.waits()
    assert [use(store, ref).sum().item() for ref in (ONE, OTHER)] == [6 * 1024, 7 * 1024]
    store.close()


def test_a_copy_comes_after_the_one_that_brought_its_source(store: ChunkStore, accelerator: Accelerator) -> None:
    store.carry_out([Issue.create(ONE, D)])
    use(store, ONE, writes=True).fill_(3)
    store.carry_out([Issue.copy(ONE, D, H), Wait.copy(ONE, H), Drop(ONE, D)])
    # Not into the slot that has the first copy behind it.
    store.carry_out([Issue.create(OTHER, D), Issue.copy(ONE, H, D), Wait.copy(ONE, D)])
    assert use(store, ONE).sum().item() == 3 * 1024
    store.close()


@pytest.mark.parametrize("filled", [False, True])
def test_a_unit_is_updated_after_what_was_computed_and_used_after_that(
    filled: bool, store: ChunkStore, accelerator: Accelerator
) -> None:
    """`filled`: then only what is computed is still under way."""
    store.carry_out([Issue.create(ONE, D)])
    if filled:
        accelerator.finish()
    use(store, ONE, writes=True).fill_(3)
    store.carry_out([Issue.update(0, D), Wait(Work.update(0, D))], update_work=doubling(store))
    assert use(store, ONE).sum().item() == 6 * 1024
    actions = [Issue.update(0, D), Wait(Work.update(0, D)), Issue.copy(ONE, D, H), Wait.copy(ONE, H)]
    store.carry_out(actions, update_work=doubling(store))
    assert store.tensor(ONE, H).sum() == 12 * 1024
    store.close()


def test_the_host_updates_what_has_come_down_and_it_goes_up_after_that(
    store: ChunkStore, accelerator: Accelerator
) -> None:
    store.carry_out([Issue.create(ONE, D)])
    use(store, ONE, writes=True).fill_(3)
    store.carry_out([Issue.copy(ONE, D, H), Wait.copy(ONE, H), Drop(ONE, D)])
    actions = [Issue.update(0, H), Wait(Work.update(0, H)), Issue.copy(ONE, H, D), Wait.copy(ONE, D)]
    store.carry_out(actions, update_work=doubling(store))
    assert use(store, ONE).sum().item() == 6 * 1024
    store.close()


def test_new_contents_are_zeros_whatever_was_there(store: ChunkStore, accelerator: Accelerator) -> None:
    for number in range(3):
        store.carry_out([Issue.create(ONE, D)])
        assert not use(store, ONE).any().item()
        use(store, ONE, writes=True).fill_(number)
        use(store, ONE).sum()
        store.release(ONE)
    store.close()


def test_new_contents_at_home_come_after_a_copy_that_still_writes_there(
    store: ChunkStore, accelerator: Accelerator
) -> None:
    store.carry_out([Issue.create(ONE, D)])
    use(store, ONE, writes=True).fill_(3)
    store.carry_out([Issue.copy(ONE, D, H), Wait.copy(ONE, H)])
    store.release(ONE)
    store.carry_out([Issue.create(ONE, H)])
    store.works.ticket(Issue.create(ONE, H)).wait()  # by a thread: before anybody else waits for the copy
    assert not store.tensor(ONE, H).any()
    store.close()


@pytest.mark.parametrize("waited", [0, 1])
def test_chunks_of_a_run_go_down_after_what_was_computed_and_updated(
    waited: int, runs: ChunkStore, accelerator: Accelerator
) -> None:
    """Also a chunk that has no update, or whose update has been waited for, which is then queued and no more."""
    runs.carry_out([Issue.create(ONE, D, 3)])
    use(runs, ONE, writes=True).fill_(3)
    runs.carry_out([Issue.update(chunk, D) for chunk in range(2 + waited)], update_work=doubling(runs))
    runs.carry_out([Wait(Work.update(2, D))] * waited)
    runs.carry_out([Issue.copy(ONE, D, H, 3), Wait(Work.update(0, D)), Wait(Work.update(1, D)), Wait.copy(ONE, H)])
    assert runs.tensor(ONE, H).sum() == (6 + 6 + 3 * (1 + waited)) * NUMEL
    runs.close()


def test_chunks_of_a_run_come_up_after_kernels_that_still_read_what_was_there(
    runs: ChunkStore, accelerator: Accelerator
) -> None:
    runs.carry_out([Issue.create(RUN, D, 3)])
    use(runs, RUN, writes=True).fill_(4)
    runs.carry_out([Issue.copy(RUN, D, H, 3), Wait.copy(RUN, H), Issue.create(ONE, H, 3)])
    runs.tensor(ONE, H).fill_(3)
    runs.wrote(ONE, H)
    total = use(runs, RUN).sum()
    actions = [Drop(RUN, D, 3), Issue.update(0, H), Issue.update(1, H), Issue.copy(ONE, H, D, 3)]
    runs.carry_out(actions, update_work=doubling(runs))
    runs.carry_out([Wait(Work.update(0, H)), Wait(Work.update(1, H)), Wait.copy(ONE, D)])
    assert use(runs, ONE).sum().item() == (6 + 6 + 3) * NUMEL
    assert total.item() == 12 * NUMEL
    runs.close()


def test_the_disk_comes_after_the_device_in_both_directions(passing: ChunkStore, accelerator: Accelerator) -> None:
    """A file is written when what it is written from has come down, and read into a slot that no copy reads any more."""
    for ref, value in ((ONE, 3), (OTHER, 4)):
        passing.carry_out([Issue.create(ref, D)])
        use(passing, ref, writes=True).fill_(value)
        passing.carry_out(
            [
                Issue.copy(ref, D, H),
                Wait.copy(ref, H),
                Issue.copy(ref, H, K),
                Wait.copy(ref, K),
                Drop(ref, H),
                Drop(ref, D),
            ]
        )
    for _ in range(100):  # a read that is too early is seen where the thread that waits for the copy has not waited yet
        for ref in (ONE, OTHER):
            passing.carry_out(
                [Issue.copy(ref, K, H), Wait.copy(ref, H), Issue.copy(ref, H, D), Wait.copy(ref, D), Drop(ref, H)]
            )
        assert [use(passing, ref).sum().item() for ref in (ONE, OTHER)] == [3 * NUMEL, 4 * NUMEL]
        passing.carry_out([Drop(ONE, D), Drop(OTHER, D)])
    passing.close()
