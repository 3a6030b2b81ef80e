"""Actions that a plan may ask for. Each is one line of text that parses back.

    c12.weight H>D x4    Copy: a transfer is issued; the unit takes four slots
    c12.weight D?        Wait: the transfer to this tier must be over now
    c12.weight D! x4     Drop: the copy's slots are given back, nothing is transferred
    c3.exp_avg 0>D       Create: first contents, all zeros
    c3 step@D            Update: the optimizer's update of a chunk begins, on this tier
    c3 step@D?           UpdateWait: it must be over now

A count of slots is printed where it is not one. The union is closed: a new kind of action is a new class here, a line
in `parse_action`, a case in `residency.apply`, and a case in `check`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef


@dataclass(frozen=True, slots=True)
class Copy:
    """Issue the transfer of a unit from one tier to its neighbour; where it arrives it takes slots now."""

    ref: PlaneRef
    src: Tier
    dst: Tier
    slots: int = 1

    def __str__(self) -> str:
        return f"{self.ref} {self.src.value}>{self.dst.value}{_times(self.slots)}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the transfer that makes a unit valid on this tier: one for each copy."""

    ref: PlaneRef
    tier: Tier

    def __str__(self) -> str:
        return f"{self.ref} {self.tier.value}?"


@dataclass(frozen=True, slots=True)
class Drop:
    """Give a copy's slots back without a transfer: another tier holds the same bytes, or nobody wants them."""

    ref: PlaneRef
    tier: Tier
    slots: int = 1

    def __str__(self) -> str:
        return f"{self.ref} {self.tier.value}!{_times(self.slots)}"


@dataclass(frozen=True, slots=True)
class Create:
    """Give a unit that has no contents slots full of zeros."""

    ref: PlaneRef
    tier: Tier
    slots: int = 1

    def __str__(self) -> str:
        return f"{self.ref} 0>{self.tier.value}{_times(self.slots)}"


@dataclass(frozen=True, slots=True)
class Update:
    """Begin the optimizer's update of a chunk on a tier, where all that it needs is; it may go on beside what follows."""

    chunk: int
    tier: Tier

    def __str__(self) -> str:
        return f"c{self.chunk} step@{self.tier.value}"


@dataclass(frozen=True, slots=True)
class UpdateWait:
    """Wait for the update of a chunk: one for each."""

    chunk: int
    tier: Tier

    def __str__(self) -> str:
        return f"c{self.chunk} step@{self.tier.value}?"


Move = Copy | Wait | Drop | Create
"""An action on one unit."""

Action = Move | Update | UpdateWait

_TIER: Final = "[DHK]"
_ACTION: Final = re.compile(
    rf"(?P<ref>\S+) (?:(?P<src>0|{_TIER})>(?P<dst>{_TIER})|(?P<tier>{_TIER})(?P<kind>[?!]))(?: x(?P<slots>[1-9]\d*))?"
)
_UPDATE: Final = re.compile(rf"c(?P<chunk>\d+) step@(?P<tier>{_TIER})(?P<waits>\??)")


def parse_action(text: str) -> Action:
    """The action that prints as `text`.

    Raises:
        ValueError: `text` is not the print of an action.
    """
    update = _UPDATE.fullmatch(text)
    if update:
        return (UpdateWait if update["waits"] else Update)(int(update["chunk"]), Tier(update["tier"]))
    found = _ACTION.fullmatch(text)
    if not found or (found["kind"] == "?" and found["slots"]) or found["slots"] == "1":
        raise ValueError(f'{text!r} is not an action, such as "c12.weight H>D x4", "c12.weight D?", "c12.weight D!"')
    ref, slots = PlaneRef.parse(found["ref"]), int(found["slots"] or 1)
    if found["kind"] == "?":
        return Wait(ref, Tier(found["tier"]))
    if found["kind"] == "!":
        return Drop(ref, Tier(found["tier"]), slots)
    if found["src"] == "0":
        return Create(ref, Tier(found["dst"]), slots)
    return Copy(ref, Tier(found["src"]), Tier(found["dst"]), slots)


def _times(slots: int) -> str:
    return "" if slots == 1 else f" x{slots}"
