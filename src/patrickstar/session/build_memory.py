"""The memory of a session: homes for every unit, slots on each tier, and the lanes between tiers. It can be built alone, and closed alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from patrickstar.core.ledger import Ledger
from patrickstar.core.machine import Tier
from patrickstar.memory.arena import Arena
from patrickstar.memory.device_space import DeviceSpace
from patrickstar.memory.disk import DiskPool
from patrickstar.memory.links import MakeLane, lanes_of
from patrickstar.memory.space import HostSpace, PinnedSpace, Space
from patrickstar.memory.store import ChunkStore
from patrickstar.memory.unit_bytes import UnitBytes
from patrickstar.memory.works_under_way import WorksUnderWay
from patrickstar.plan.residency import Residency
from patrickstar.session.start import Setup, resting_state
from patrickstar.step.precision import torch_type
from patrickstar.units import parse_rate


def build_memory(setup: Setup, *, make_lane: MakeLane | None = None) -> ChunkStore:
    """The store with every unit at home, without contents yet.

    Args:
        make_lane: lanes in place of those that the options ask for.
    Raises:
        BudgetError: no batch could fit. DeviceError: the disk cannot be used. Nothing is allocated then.
    """
    memory, layout, budgets, formats = setup.memory, setup.layout, setup.budgets, setup.formats
    machine, options = budgets.machine, memory.options
    state = resting_state(setup, clips=memory.max_grad_norm is not None)
    on_disk = {ref: state.unit_bytes(ref) for ref, tier in state.home.items() if tier is Tier.DISK}
    pool = None
    # What comes later may be all that rests there: gradients that have to wait, or are widened.
    if memory.disk is not None:
        pool = DiskPool(memory.disk, units=on_disk, budget_bytes=machine.budget[Tier.DISK])
    ledger = Ledger()
    for ref, tier in state.home.items():
        if tier is not machine.compute:
            ledger.add(tier, state.unit_bytes(ref))
    rate = None if options.emulated_link is None else parse_rate(options.emulated_link, name="emulated_link")
    lanes = lanes_of(bytes_per_second=rate, stress_seed=options.stress_seed, device=budgets.stream_device)
    units = UnitBytes(
        state=state,
        arenas=_arenas(setup, state),
        disk=pool,
        dtype=lambda ref: torch_type(formats.now.at(ref.chunk, layout)[ref.plane]),
        ledger=ledger,
    )
    device, poison = budgets.stream_device, options.poison
    works = WorksUnderWay(units, make_lane or lanes, chunks=layout.slots, device=device, poison=poison)
    return ChunkStore(units, works)


def _arenas(setup: Setup, state: Residency) -> dict[Tier, Arena]:
    """The arenas of the tier that computes and of the host, by tier."""
    layout, machine = setup.layout, setup.budgets.machine
    # More addresses than slots can ever be in use, all of it fp32 and trained: runs of adjacent free ones are always found.
    chunk_slots = layout.chunk_numel * 4 // state.slot_bytes
    total, longest = 5 * layout.n_chunks * chunk_slots, chunk_slots * max(run.length for run in layout.runs)
    virtual_slots, device = 2 * total + 8 * longest + 16, setup.budgets.stream_device
    spaces: dict[Tier, Callable[..., Space]] = dict.fromkeys(Tier, HostSpace)
    if device is not None:
        spaces = {Tier.DEVICE: partial(DeviceSpace, device=device), Tier.HOST: PinnedSpace}
    return {
        tier: Arena(state.slot_bytes, virtual_slots=virtual_slots, name=tier.label, make_space=spaces[tier])
        for tier in dict.fromkeys((machine.compute, Tier.HOST))
    }
