"""Which tier each unit rests on: its home. Decided once, before the first plan, from sizes alone.

Everything is at home on the compute tier where the whole fits there beside the largest non-model bytes. Where it does
not, everything rests one tier below and the compute tier keeps cached copies, so that eviction may choose freely at
every moment. Where a device computes and the host is too small as well, what is used once a step goes to disk first:
second moments, first moments, then gradients, then weights, of the last chunks first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from patrickstar.core.formats import Formats
from patrickstar.core.layout import Layout
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.plane import EXP_AVG, EXP_AVG_SQ, GRAD, REST, WEIGHT, PlaneRef
from patrickstar.errors import BudgetError
from patrickstar.plan.refusal import refuse_homes
from patrickstar.plan.residency import bytes_of_slot, slots_of

_TO_DISK: Final = (EXP_AVG_SQ, EXP_AVG, REST, GRAD, WEIGHT)


def place(
    layout: Layout,
    machine: Machine,
    *,
    planes: Iterable[str],
    formats: Formats,
    disk: bool = True,
    nonmodel_bytes: int = 0,
    transient: Collection[str] = (),
) -> dict[PlaneRef, Tier]:
    """The home of every unit of these planes.

    Args:
        disk: whether the disk tier may be used; it is not where the machine has none.
        nonmodel_bytes: the most non-model bytes of any moment, as far as is known.
        transient: planes of which a few units at a time have contents: where there is no tier below the one that
            computes, they are not counted, and each plan shows what they need.
    Raises:
        BudgetError: homes do not fit the host or the disk.
    """
    units = list(formats.units(layout, planes))
    slot_bytes = bytes_of_slot(layout, formats)
    sizes = {ref: slots_of(ref, layout, formats) * slot_bytes for ref in units}
    compute, budget = machine.compute, machine.budget
    disk_bytes = budget.get(Tier.DISK, 0) if disk else 0
    if sum(sizes.values()) + nonmodel_bytes <= budget[compute]:
        return dict.fromkeys(units, compute)
    if compute is Tier.HOST:
        if disk_bytes:
            _refuse_full_disk(sizes.values(), disk_bytes)
            return dict.fromkeys(units, Tier.DISK)
        lasting = sum(nbytes for ref, nbytes in sizes.items() if ref.plane not in transient)
        if lasting + nonmodel_bytes > budget[compute]:
            raise refuse_homes(
                tier=compute,
                parts={"model data": lasting, "activations": nonmodel_bytes},
                budget_bytes=budget[compute],
                smallest_bytes=lasting + nonmodel_bytes,
                instead="a disk below it: disk=DIRECTORY",
            )
        return dict.fromkeys(units, compute)
    spilled = _spill(sizes, host_bytes=budget[Tier.HOST], disk=disk_bytes > 0)
    _refuse_full_disk((sizes[ref] for ref in spilled), disk_bytes)
    return {ref: Tier.DISK if ref in spilled else Tier.HOST for ref in units}


def bytes_below(
    *, home: Mapping[PlaneRef, Tier], slots: Mapping[PlaneRef, int], slot_bytes: int, compute: Tier
) -> dict[Tier, int]:
    """Bytes each tier below the compute tier must hold: homes, and on the host the slots for staging one unit."""
    held = {tier: 0 for tier in Tier if tier is not compute}
    staging = 0
    for ref, tier in home.items():
        if tier is not compute:
            held[tier] += slots[ref] * slot_bytes
            if tier is Tier.DISK and compute is Tier.DEVICE:
                staging = max(staging, slots[ref] * slot_bytes)
    if staging:
        held[Tier.HOST] += staging
    return held


def refuse_unless_homes_fit(
    machine: Machine, *, home: Mapping[PlaneRef, Tier], slots: Mapping[PlaneRef, int], slot_bytes: int
) -> None:
    """Raises BudgetError where the tiers below the compute tier cannot hold what rests there."""
    for tier, nbytes in bytes_below(home=home, slots=slots, slot_bytes=slot_bytes, compute=machine.compute).items():
        budget_bytes = machine.budget.get(tier, 0)
        if nbytes > budget_bytes:
            raise refuse_homes(
                tier=tier, parts={"model data": nbytes}, budget_bytes=budget_bytes, smallest_bytes=nbytes
            )


def place_more(
    machine: Machine,
    new: Collection[PlaneRef],
    *,
    home: Mapping[PlaneRef, Tier],
    slots: Mapping[PlaneRef, int],
    slot_bytes: int,
    disk: bool,
) -> dict[PlaneRef, Tier]:
    """The homes of units that a session gets later than the rest, or that become larger: these keep theirs, unless only the disk has room.

    Args:
        home: of all units so far. slots: of all of them, the new ones included. disk: whether there is a disk to rest on.
    Raises:
        BudgetError: they do not fit beside what rests there.
    """
    compute = machine.compute
    beside = Tier.HOST if compute is Tier.DEVICE or Tier.DISK not in home.values() else Tier.DISK
    found = {ref: home.get(ref, beside) for ref in new}
    if beside is not compute:
        try:
            refuse_unless_homes_fit(machine, home={**home, **found}, slots=slots, slot_bytes=slot_bytes)
        except BudgetError:
            if compute is not Tier.DEVICE or not disk:
                raise
            found = dict.fromkeys(new, Tier.DISK)
            refuse_unless_homes_fit(machine, home={**home, **found}, slots=slots, slot_bytes=slot_bytes)
        return found
    needed = sum(slots[ref] for ref in {**home, **found}) * slot_bytes
    if needed > machine.budget[compute]:
        raise refuse_homes(
            tier=compute,
            parts={"model data": needed},
            budget_bytes=machine.budget[compute],
            smallest_bytes=needed,
            instead="a disk below it: disk=DIRECTORY",
        )
    return found


def _spill(sizes: Mapping[PlaneRef, int], *, host_bytes: int, disk: bool) -> set[PlaneRef]:
    """The units that go to disk, so that the rest and one staged unit fit the host."""
    rest, staging = sum(sizes.values()), 0
    spilled: set[PlaneRef] = set()
    if rest <= host_bytes:
        return spilled
    if not disk:
        raise refuse_homes(
            tier=Tier.HOST,
            parts={"model data": rest},
            budget_bytes=host_bytes,
            smallest_bytes=rest,
            instead="a disk below it: disk=DIRECTORY",
        )
    turn = {plane: number for number, plane in enumerate(_TO_DISK)}
    for ref in sorted(sizes, key=lambda ref: (turn[ref.plane], -ref.chunk)):
        rest -= sizes[ref]
        staging = max(staging, sizes[ref])
        spilled.add(ref)
        if rest + staging <= host_bytes:
            return spilled
    raise refuse_homes(
        tier=Tier.HOST, parts={"staging of one unit": staging}, budget_bytes=host_bytes, smallest_bytes=staging
    )


def _refuse_full_disk(sizes: Iterable[int], disk_bytes: int) -> None:
    needed = sum(sizes)
    if needed > disk_bytes:
        raise refuse_homes(tier=Tier.DISK, parts={"model data": needed}, budget_bytes=disk_bytes, smallest_bytes=needed)
