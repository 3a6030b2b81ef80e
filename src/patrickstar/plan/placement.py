"""Homes: the tier that each unit rests on. Decided from sizes alone: once, before the first plan, and for units that come later, when they come.

Everything is at home on the compute tier where the whole fits there beside the largest non-model bytes. Where it does not, everything rests one tier
below and the compute tier keeps copies, so that eviction may choose freely at every moment. Where a device computes and the host is too small as
well, what is used once a step goes to disk first, of the last chunks first. What the tiers below have no room for rests where it computes: weights
first, which are used most often. Gradients that are used as they arrive have no home; those that must wait get theirs when that is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

from patrickstar.core.formats import Formats
from patrickstar.core.layout import Layout
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, REST, WEIGHT, PlaneRef
from patrickstar.errors import BudgetError
from patrickstar.plan.fit import refuse_homes
from patrickstar.plan.residency import Residency, bytes_of_slot, slots_of

_TO_DISK: Final = (EXP_AVG_SQ, EXP_AVG, REST, GRAD, WEIGHT)
_STAGING_SHARE: Final = 64  # of the host, that what passes through has at least, if it is more than a unit
_DISK_BELOW: Final = "a disk below it: disk=DIRECTORY"


def place(
    layout: Layout, machine: Machine, *, planes: Iterable[str], formats: Formats, nonmodel_bytes: int = 0
) -> dict[PlaneRef, Tier]:
    """The home of every unit of `planes`.

    Args:
        nonmodel_bytes: the most non-model bytes of any moment, as far as is known.
    Raises:
        BudgetError: homes do not fit the host or the disk.
    """
    sizes = _sizes(layout, planes, formats)
    compute, budget = machine.compute, machine.budget
    if sum(sizes.values()) + nonmodel_bytes <= budget[compute]:
        return dict.fromkeys(sizes, compute)
    if compute is Tier.HOST and not budget.get(Tier.DISK):
        raise _refuse_homes_there(machine, {"model states": sum(sizes.values()), "activations": nonmodel_bytes})
    return _all_below(machine, sizes)


def place_on_all_tiers(
    layout: Layout, machine: Machine, *, planes: Iterable[str], formats: Formats
) -> dict[PlaneRef, Tier]:
    """The home of every unit of `planes` where the tiers below the one that computes have no room for all: as little as can be rests there.

    Raises:
        BudgetError: homes do not fit all tiers together.
    """
    sizes = _sizes(layout, planes, formats)
    compute, budget = machine.compute, machine.budget
    below = disk_bytes = budget.get(Tier.DISK, 0)
    if compute is Tier.DEVICE:
        below += budget[Tier.HOST] - (max(sizes.values(), default=0) if disk_bytes else 0)
    excess = sum(sizes.values()) - below
    here: dict[PlaneRef, Tier] = {}
    for ref in reversed(_to_disk(sizes)):
        if excess <= 0:
            break
        here[ref] = compute
        excess -= sizes[ref]
    return {**here, **_all_below(machine, {r: n for r, n in sizes.items() if r not in here})}


def _sizes(layout: Layout, planes: Iterable[str], formats: Formats) -> dict[PlaneRef, int]:
    slot_bytes = bytes_of_slot(layout, formats)
    return {ref: slots_of(ref, layout, formats) * slot_bytes for ref in formats.units(layout, planes)}


def _all_below(machine: Machine, sizes: Mapping[PlaneRef, int]) -> dict[PlaneRef, Tier]:
    """Homes below the tier that computes. BudgetError: there is no room for all of that."""
    homes = _place_below(machine, sizes)
    if machine.compute is Tier.DEVICE and Tier.DISK in homes.values():
        # Transfers of several units at once need room on the host, if the disk has room for what gives that.
        with suppress(BudgetError):
            return _place_below(machine, sizes, staging=machine.budget[Tier.HOST] // _STAGING_SHARE)
    return homes


def _place_below(
    machine: Machine,
    sizes: Mapping[PlaneRef, int],
    *,
    resting: Mapping[Tier, int] | None = None,
    staging: int = 0,
    why: str = "",
) -> dict[PlaneRef, Tier]:
    """Homes below the tier that computes of units of these sizes: all model states, or gradients beside the bytes of them that are `resting`.

    `staging`: bytes for what passes through the host, at least, if something rests on the disk. BudgetError: there is no room for all of that.
    """
    disk_bytes, spilled = machine.budget.get(Tier.DISK, 0), set(sizes)
    if machine.compute is Tier.DEVICE:
        host_bytes, held = machine.budget[Tier.HOST], resting[Tier.HOST] if resting else 0
        spilled = _spill(sizes, host_bytes=host_bytes, disk=disk_bytes > 0, held=held, staging=staging, why=why)
    on_disk = sum(sizes[ref] for ref in spilled)
    parts = {"model states": resting[Tier.DISK], "gradients": on_disk} if resting else {"model states": on_disk}
    if sum(parts.values()) > disk_bytes:
        raise refuse_homes(tier=Tier.DISK, parts=parts, budget_bytes=disk_bytes, why=why)
    return {ref: Tier.DISK if ref in spilled else Tier.HOST for ref in sizes}


def place_gradients(
    machine: Machine, kept: Collection[PlaneRef], *, state: Residency, layout: Layout, formats: Formats, why: str
) -> tuple[dict[PlaneRef, Tier], dict[PlaneRef, int]]:
    """Homes and sizes of gradients that must wait for their update, of those that have none yet: beside the rest of the model data.

    Where all of that is at home on the compute tier, so are they, and take room only while they are kept. Else they rest below, on the host
    first; and on a device that could hold all model data, where the tiers below have no room.

    Args:
        kept: those that will be kept at once, beside those that have contents now. why: which they are, for a message.
    Raises:
        BudgetError: they do not fit beside what rests there.
    """
    compute, home = machine.compute, state.home
    slots = {ref: slots_of(ref, layout, formats) for ref in kept if ref not in home}
    new = {ref: count * state.slot_bytes for ref, count in slots.items()}
    rest = [ref for ref in home if ref.plane != GRAD]
    if all(home[ref] is compute for ref in rest):
        there = [ref for ref in home if ref.plane == GRAD and (ref in kept or not state.is_free(ref))]
        gradient_bytes = sum(map(state.unit_bytes, there)) + sum(new.values())
        parts = {"model states": sum(map(state.unit_bytes, rest)), "gradients": gradient_bytes}
        if sum(parts.values()) > machine.budget[compute]:
            raise _refuse_homes_there(machine, parts, why=why)
        return dict.fromkeys(new, compute), slots
    resting = {tier: nslots * state.slot_bytes for tier, nslots in state.slots_resting.items()}
    staging = max((state.unit_bytes(ref) for ref, tier in home.items() if tier is Tier.DISK), default=0)
    below = partial(_place_below, machine, new, resting=resting, why=why)
    if machine.budget.get(Tier.DISK) and new:
        # Others may come, for which the host may have no room: what rests on the disk is staged through it.
        with suppress(BudgetError):
            return below(staging=max(staging, *new.values())), slots
    try:
        return below(staging=staging), slots
    except BudgetError:
        if compute is Tier.HOST or sum(map(state.unit_bytes, home)) + sum(new.values()) > machine.budget[compute]:
            raise
        return dict.fromkeys(new, compute), slots


def refuse_unless_homes_fit(
    machine: Machine, *, home: Mapping[PlaneRef, Tier], slots: Mapping[PlaneRef, int], slot_bytes: int
) -> None:
    """Raises BudgetError where the tiers below the compute tier cannot hold what rests there, and the host the slots for staging one unit."""
    held: dict[Tier, list[int]] = {tier: [] for tier in Tier}
    for ref, tier in home.items():
        held[tier].append(slots[ref])
    if machine.compute is Tier.DEVICE:
        held[Tier.HOST].append(max(held[Tier.DISK], default=0))
    for tier, counts in held.items():
        nbytes, budget_bytes = sum(counts) * slot_bytes, machine.budget.get(tier, 0)
        if tier is not machine.compute and nbytes > budget_bytes:
            raise refuse_homes(tier=tier, parts={"model states": nbytes}, budget_bytes=budget_bytes)


def place_more(
    machine: Machine,
    new: Collection[PlaneRef],
    *,
    home: Mapping[PlaneRef, Tier],
    slots: Mapping[PlaneRef, int],
    slot_bytes: int,
) -> dict[PlaneRef, Tier]:
    """The homes of units that a session gets later than the rest, or that become larger: those keep their homes, unless only the disk has room.

    Args:
        home: of all units so far. slots: of all of them, the new ones included.
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
            if compute is not Tier.DEVICE or Tier.DISK not in machine.budget:
                raise
            found = dict.fromkeys(new, Tier.DISK)
            refuse_unless_homes_fit(machine, home={**home, **found}, slots=slots, slot_bytes=slot_bytes)
        return found
    needed = sum(slots[ref] for ref in {**home, **found}) * slot_bytes
    if needed > machine.budget[compute]:
        raise _refuse_homes_there(machine, {"model states": needed})
    return found


def _refuse_homes_there(machine: Machine, parts: dict[str, int], *, why: str = "") -> BudgetError:
    """An error for what is to rest on the compute tier and takes more than there is."""
    compute = machine.compute
    return refuse_homes(
        tier=compute,
        parts=parts,
        fixed_bytes=machine.costs.beside(sum(parts.values())),
        budget_bytes=machine.given(compute),
        instead=_DISK_BELOW if compute is Tier.HOST else "",
        why=why,
    )


def _spill(
    sizes: Mapping[PlaneRef, int], *, host_bytes: int, disk: bool, held: int, staging: int, why: str
) -> set[PlaneRef]:
    """The units that go to disk, so that the rest, what is `held` on the host, and one staged unit, of `staging` bytes at least, fit the host."""
    rest = held + sum(sizes.values())
    spilled: set[PlaneRef] = set()
    if rest + staging <= host_bytes:
        return spilled
    if not disk:
        raise refuse_homes(
            tier=Tier.HOST,
            parts={"model states": held, "gradients": sum(sizes.values())} if held else {"model states": rest},
            budget_bytes=host_bytes,
            instead=_DISK_BELOW,
            why=why,
        )
    for ref in _to_disk(sizes):
        rest -= sizes[ref]
        staging = max(staging, sizes[ref])
        spilled.add(ref)
        if rest + staging <= host_bytes:
            return spilled
    parts = {**({"model states": held} if held else {}), "staging of one unit": staging}
    raise refuse_homes(tier=Tier.HOST, parts=parts, budget_bytes=host_bytes, why=why)


def _to_disk(refs: Iterable[PlaneRef]) -> list[PlaneRef]:
    """Units in the order in which they go to disk."""
    return sorted(refs, key=lambda ref: (_TO_DISK.index(ref.plane), -ref.chunk))
