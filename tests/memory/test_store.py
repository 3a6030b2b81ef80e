"""memory/store.py: bytes are where actions say, whenever the works on their slots end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.memory.arena import Arena
from patrickstar.memory.lanes import InlineLane, Lane, ThreadLane
from patrickstar.memory.store import ChunkStore
from patrickstar.plan.actions import Drop, Issue, Wait, Work
from patrickstar.plan.residency import InvariantError
from tests.manual_lane import ManualLane
from tests.memory.stores import SLOT_BYTES, store_of

D, H = Tier.DEVICE, Tier.HOST
ONE, OTHER = PlaneRef(0, "weight"), PlaneRef(1, "weight")


def store_of_one_slot(make_lane: Callable[[Tier, Tier | None], Lane]) -> ChunkStore:
    """Two units without contents that rest on the host, and room for one of them on the device."""
    arenas = {tier: Arena(SLOT_BYTES, virtual_slots=slots, name=tier.label) for tier, slots in ((D, 1), (H, 2))}
    return store_of({ONE: H, OTHER: H}, {ONE: 1, OTHER: 1}, arenas=arenas, make_lane=make_lane)


def filled(store: ChunkStore, ref: PlaneRef, value: float) -> None:
    """Gives a unit contents, and has it rest at home."""
    store.carry_out([Issue.create(ref, D)])
    store.tensor(ref).fill_(value)
    store.wrote(ref)
    store.carry_out([Issue.copy(ref, D, H), Wait.copy(ref, H), Drop(ref, D)])


def slow_filling(src: Tier, dst: Tier | None) -> Lane:
    return ManualLane() if src is dst else InlineLane()


def test_zeros_are_there_when_a_unit_is_used() -> None:
    store = store_of_one_slot(slow_filling)
    filled(store, OTHER, 5.0)
    store.carry_out([Issue.create(ONE, D)])
    assert store.tensor(ONE).eq(0).all()
    store.close()


def test_a_unit_that_leaves_at_once_leaves_with_its_zeros() -> None:
    store = store_of_one_slot(slow_filling)
    filled(store, OTHER, 5.0)
    store.carry_out([Issue.create(ONE, D), Issue.copy(ONE, D, H), Wait.copy(ONE, H), Drop(ONE, D)])
    assert store.tensor(ONE, H).eq(0).all()
    assert store.tensor(OTHER, H).eq(5).all()
    store.close()


def test_slots_that_are_given_back_at_once_have_their_zeros_behind_them() -> None:
    store = store_of_one_slot(slow_filling)
    filled(store, OTHER, 5.0)
    store.carry_out([Issue.create(ONE, D)])
    store.forget(ONE)
    store.carry_out([Drop(ONE, D), Issue.copy(OTHER, H, D), Wait.copy(OTHER, D)])
    store.works.drain()
    assert store.tensor(OTHER).eq(5).all()
    store.close()


def test_an_interruption_at_issue_leaves_no_slot_taken() -> None:
    class Refuses(InlineLane):
        def issue(self, *_: object, **__: object) -> None:  # type: ignore[override]
            raise KeyboardInterrupt

    store = store_of_one_slot(lambda src, dst: Refuses() if (src, dst) == (H, D) else InlineLane())
    filled(store, ONE, 3.0)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            store.carry_out([Issue.copy(ONE, H, D)])
    assert (store.state.slots_used[D], store.units.committed_slots) == (0, 1)
    assert not store.state.in_flight
    store.carry_out([Issue.create(OTHER, D)])
    assert store.tensor(OTHER).eq(0).all()
    store.close()


class UpdatesOf:
    """A store of one unit on the device whose updates add one to it, as late as the test says."""

    def __init__(self) -> None:
        self.may_begin = threading.Event()
        self.store = store_of_one_slot(lambda src, dst: ThreadLane("updates") if dst is None else ManualLane())
        filled(self.store, ONE, 1.0)
        self.store.carry_out([Issue.copy(ONE, H, D), Wait.copy(ONE, D)])

    def work(self, chunk: int, tier: Tier) -> Callable[[], None]:
        assert (chunk, tier) == (0, D)
        weight = self.store.tensor(ONE)

        def work() -> None:
            assert self.may_begin.wait(60)
            weight.add_(1.0)

        return work


@pytest.fixture
def updates() -> Iterator[UpdatesOf]:
    made = UpdatesOf()
    yield made
    made.may_begin.set()
    made.store.close()


def test_a_transfer_of_what_an_update_writes_comes_after_it(updates: UpdatesOf) -> None:
    store = updates.store
    store.carry_out([Issue.update(0, D), Issue.copy(ONE, D, H)], update_work=updates.work)
    threading.Timer(0.1, updates.may_begin.set).start()
    store.works.ticket(Issue.copy(ONE, D, H)).wait()
    store.carry_out([Wait(Work.update(0, D)), Wait.copy(ONE, H)])
    assert store.tensor(ONE, H).eq(2).all()


def test_nobody_gets_the_bytes_that_an_update_writes_before_its_wait(updates: UpdatesOf) -> None:
    store = updates.store
    store.carry_out([Issue.update(0, D)], update_work=updates.work)
    with pytest.raises(InvariantError, match=r"\(10\) c0.weight is used while c0 step@D is under way"):
        store.tensor(ONE)
    updates.may_begin.set()
    with pytest.raises(InvariantError, match=r"\(10\)"):
        store.carry_out([Drop(ONE, D)])
    assert not store.state.updates, "whatever goes wrong, what is under way ends first"


def test_what_is_landed_is_updated(updates: UpdatesOf) -> None:
    store = updates.store
    store.carry_out([Issue.update(0, D)], update_work=updates.work)
    updates.may_begin.set()
    store.land(ONE)
    assert store.tensor(ONE).eq(2).all()


def test_an_update_that_fails_says_so_at_its_wait(updates: UpdatesOf) -> None:
    store = updates.store

    def fails() -> None:
        raise ZeroDivisionError

    store.carry_out([Issue.update(0, D)], update_work=lambda chunk, tier: fails)
    with pytest.raises(ZeroDivisionError):
        store.carry_out([Wait(Work.update(0, D))])
    assert not store.state.updates
