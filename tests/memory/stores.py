"""Stores of a few units of fp32, without contents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from patrickstar.core.ledger import Ledger
from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.memory.arena import Arena
from patrickstar.memory.links import Links
from patrickstar.memory.store import ChunkStore
from patrickstar.plan.residency import Residency
from patrickstar.plan.snapshot import Snapshot

__all__ = ["SLOT_BYTES", "store_of"]

SLOT_BYTES: Final = 4096


def store_of(
    homes: Mapping[PlaneRef, Tier],
    slots: Mapping[PlaneRef, int],
    *,
    arenas: Mapping[Tier, Arena],
    links: Links,
    **more: Any,
) -> ChunkStore:
    """Units of so many chunks, of a slot each, that rest in these places beside a device."""
    ledger = Ledger()
    ledger.add(Tier.HOST, SLOT_BYTES * sum(slots[ref] for ref, tier in homes.items() if tier is Tier.HOST))
    state = Residency.of(Snapshot(Tier.DEVICE, SLOT_BYTES, homes, slots, newest={}, taken={}))
    options = {"disk": None, "dtype": lambda _: torch.float32, "chunks": slots.__getitem__, "ledger": ledger, **more}
    return ChunkStore(state, arenas=arenas, links=links, **options)
