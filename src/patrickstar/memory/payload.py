"""Payloads: the condition of one unit's bytes on a tier, exactly one of three.

    Released ──issue──> InFlight ──wait──> Resident ──give──> Released

An in-flight payload whose wait raises has delivered nothing: it is released again, and its source is what it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from patrickstar.core.machine import Tier
from patrickstar.memory.lanes import Ticket

__all__ = ["InFlight", "Payload", "Released", "Resident", "readable_on"]


@dataclass(frozen=True, slots=True)
class Released:
    """No bytes of the unit on the tier. Nothing may be trusted: the slot once held may have its next tenant already."""


@dataclass(frozen=True, slots=True)
class Resident:
    """The bytes lie in `slots` adjacent slots of a tier, from `slot` on, and may be read.

    These bytes are the newest unless a newer copy on the compute tier is dirty. Neither slot nor address outlasts this
    condition: what is kept longer than a pin or a lease is read anew. On disk, `slot` and `slots` are 0: the unit's
    extent there never changes.
    """

    tier: Tier
    slot: int
    slots: int


@dataclass(frozen=True, slots=True)
class InFlight:
    """A transfer was issued and not waited for.

    What lies on `dst`, from `slot` on, is undefined and belongs to the transfer; it may be neither read, written nor
    given back. What lies on `src` may be read, but neither written nor given back, since it may not have been read yet.
    `slot` is on `dst`, or on `src` where `dst` is the disk, which has no slots. Only `ticket.wait()` ends this condition.
    """

    ticket: Ticket
    src: Tier
    dst: Tier
    slot: int


Payload = Released | Resident | InFlight


def readable_on(payload: Payload, tier: Tier) -> bool:
    """Tells whether the bytes may be read on a tier now."""
    match payload:
        case Resident(tier=here):
            return here is tier
        case Released() | InFlight():
            return False
