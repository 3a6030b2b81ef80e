"""Stores of a few units of fp32, without contents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from patrickstar.core.ledger import Ledger
from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.memory.arena import Arena
from patrickstar.memory.disk import DiskPool
from patrickstar.memory.store import ChunkStore
from patrickstar.memory.unit_bytes import UnitBytes
from patrickstar.memory.works_under_way import MakeLane, WorksUnderWay
from patrickstar.plan.plan import Snapshot
from patrickstar.plan.residency import Residency

SLOT_BYTES: Final = 4096


def store_of(
    homes: Mapping[PlaneRef, Tier],
    slots: Mapping[PlaneRef, int],
    *,
    arenas: Mapping[Tier, Arena],
    make_lane: MakeLane,
    ledger: Ledger | None = None,
    disk: DiskPool | None = None,
    **more: Any,
) -> ChunkStore:
    """Units of so many chunks, of a slot each, that rest in these places beside a device."""
    resting = Ledger()
    resting.add(Tier.HOST, SLOT_BYTES * sum(slots[ref] for ref, tier in homes.items() if tier is Tier.HOST))
    state = Residency.of(Snapshot(Tier.DEVICE, SLOT_BYTES, homes, slots, newest={}, taken={}))
    units = UnitBytes(state=state, arenas=arenas, disk=disk, dtype=lambda _: torch.float32, ledger=ledger or resting)
    return ChunkStore(units, WorksUnderWay(units, make_lane, chunks=slots.__getitem__, **more))


def keep_log(store: Any) -> Any:
    """The store, which keeps in `log` the actions that it carries out from now on: what a session has really done."""
    do, store.log = store._do, []
    store._do = lambda *action: (do(*action), store.log.append(action[0]))
    return store
