"""Actions before rows of units are read or added to where the units rest (`Rows` of `core/trace.py`)."""

from __future__ import annotations

from collections.abc import Iterable

from patrickstar.core.machine import Tier
from patrickstar.core.trace import Rows
from patrickstar.plan.actions import Action, Copy, Create, Drop, Wait
from patrickstar.plan.residency import CLEAN, DIRTY, InvariantError, Residency, apply

__all__ = ["link_of", "prepare_rows", "state_after"]


def prepare_rows(state: Residency, rows: Rows) -> list[Action]:
    """Copies home units that are newer on the compute tier, and drops them from there where rows are added. Units without contents get zeros at home.

    Raises:
        InvariantError: a unit does not rest on the host below a device (9), or is read without contents (1).
    """
    actions: list[Action] = []
    for ref in rows.refs:
        slots = state.slots[ref]
        if state.compute is not Tier.DEVICE or state.home[ref] is not Tier.HOST:
            raise InvariantError(9, f"rows of {ref} are used on the {state.home[ref].label}")
        if ref in state.free:
            if not rows.writes:
                raise InvariantError(1, f"rows of {ref} are read, which has no contents")
            actions += [Drop(ref, state.compute, slots)] if ref in state.void else []
            actions.append(Create(ref, Tier.HOST, slots))
            continue
        copy = state.resident.get(ref)
        if copy is DIRTY:
            actions += [Copy(ref, state.compute, Tier.HOST, slots), Wait(ref, Tier.HOST)]
        if rows.writes and copy in (CLEAN, DIRTY):
            actions.append(Drop(ref, state.compute, slots))
    return actions


def state_after(state: Residency, actions: Iterable[Action]) -> Residency:
    """A copy of a state after these actions; the state stays as it is."""
    after = state.copy()
    for action in actions:
        apply(after, action)
    return after


def link_of(rows: Rows) -> tuple[Tier, Tier]:
    """The tiers from which and to which the rows go."""
    return (Tier.DEVICE, Tier.HOST) if rows.writes else (Tier.HOST, Tier.DEVICE)
