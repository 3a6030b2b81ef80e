"""memory/store.py: bytes are where actions say, whenever the works on their slots end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from patrickstar.core.ledger import Ledger
from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.memory.arena import Arena
from patrickstar.memory.lanes import InlineLane, Lane
from patrickstar.memory.links import Links
from patrickstar.memory.store import ChunkStore
from patrickstar.plan.actions import Copy, Create, Drop, Wait
from patrickstar.plan.residency import Residency
from patrickstar.plan.snapshot import Snapshot
from patrickstar.testing.manual_lane import ManualLane

D, H = Tier.DEVICE, Tier.HOST
ONE, OTHER = PlaneRef(0, "weight"), PlaneRef(1, "weight")
SLOT_BYTES = 4096


def store_of_one_slot(make_lane: Callable[[Tier, Tier], Lane]) -> ChunkStore:
    """Two units without contents that rest on the host, and room for one of them on the device."""
    state = Residency.of(Snapshot(D, SLOT_BYTES, {ONE: H, OTHER: H}, {ONE: 1, OTHER: 1}, newest={}, taken={}))
    arenas = {tier: Arena(SLOT_BYTES, virtual_slots=slots, name=tier.label) for tier, slots in ((D, 1), (H, 2))}
    ledger = Ledger()
    ledger.add(H, 2 * SLOT_BYTES)
    return ChunkStore(
        state, arenas=arenas, disk=None, links=Links(make_lane), dtype=lambda _: torch.float32, ledger=ledger
    )


def filled(store: ChunkStore, ref: PlaneRef, value: float) -> None:
    """Gives a unit contents, and has it rest at home."""
    store.carry_out([Create(ref, D)])
    store.tensor(ref).fill_(value)
    store.wrote(ref)
    store.carry_out([Copy(ref, D, H), Wait(ref, H), Drop(ref, D)])


def slow_filling(src: Tier, dst: Tier) -> Lane:
    return ManualLane() if src is dst else InlineLane()


def test_zeros_are_there_when_a_unit_is_used() -> None:
    store = store_of_one_slot(slow_filling)
    filled(store, OTHER, 5.0)
    store.carry_out([Create(ONE, D)])
    assert store.tensor(ONE).eq(0).all()
    store.close()


def test_a_unit_that_leaves_at_once_leaves_with_its_zeros() -> None:
    store = store_of_one_slot(slow_filling)
    filled(store, OTHER, 5.0)
    store.carry_out([Create(ONE, D), Copy(ONE, D, H), Wait(ONE, H), Drop(ONE, D)])
    assert store.tensor(ONE, H).eq(0).all()
    assert store.tensor(OTHER, H).eq(5).all()
    store.close()


def test_slots_that_are_given_back_at_once_have_their_zeros_behind_them() -> None:
    store = store_of_one_slot(slow_filling)
    filled(store, OTHER, 5.0)
    store.carry_out([Create(ONE, D)])
    store.forget(ONE)
    store.carry_out([Drop(ONE, D), Copy(OTHER, H, D), Wait(OTHER, D)])
    store._links.drain()
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
            store.carry_out([Copy(ONE, H, D)])
    assert (store.state.slots_used[D], store.committed_slots) == (0, 1)
    assert not store.state.in_flight
    store.carry_out([Create(OTHER, D)])
    assert store.tensor(OTHER).eq(0).all()
    store.close()
