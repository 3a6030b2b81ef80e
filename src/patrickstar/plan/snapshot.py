"""Where every unit is at one time, frozen: what a plan starts from and what it leads to.

Prints a line per plane, home and condition, and parses back:

    on D, slots of 4096 bytes
      exp_avg H free 0-7
      weight H away 0-2 3x4
      weight H dirty 7

that is: of the weights, at home on the host, the unit of chunk 7 also has a copy on the device that is newer; those of
chunks 0 to 2 and the run of four chunks from chunk 3 on are at home only; no first moment has contents yet.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef


class CopyState(Enum):
    """What is true of a unit's copy on the compute tier."""

    HERE = "here"  # the compute tier is its home: never evicted
    CLEAN = "clean"  # its home below holds the same bytes: may be dropped
    DIRTY = "dirty"  # newer than its home: must be written back before it is dropped


class Condition(Enum):
    """Where a unit's contents are, and whether it takes slots of the compute tier."""

    FREE = "free"  # no contents, no slots
    VOID = "void"  # no contents any more; its slots are yet to be given back
    AWAY = "away"  # at home below, no slots
    HERE = "here"
    CLEAN = "clean"
    DIRTY = "dirty"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a `Residency` between moments, when nothing is in flight.

    Attributes:
        compute: the tier that computes; slot_bytes: bytes of one slot.
        home, slots: of every unit, the tier it rests on and the slots it takes.
        resident: the units that take slots of the compute tier.
        free: the units that have no contents.
    """

    compute: Tier
    slot_bytes: int
    home: Mapping[PlaneRef, Tier]
    slots: Mapping[PlaneRef, int]
    resident: Mapping[PlaneRef, CopyState]
    free: frozenset[PlaneRef]

    def __post_init__(self) -> None:
        for name in ("home", "slots", "resident"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def condition(self, ref: PlaneRef) -> Condition:
        """What is true of a unit."""
        copy = self.resident.get(ref)
        if ref in self.free:
            return Condition.FREE if copy is None else Condition.VOID
        return Condition.AWAY if copy is None else Condition(copy.value)

    @property
    def slots_used(self) -> int:
        """Slots of the compute tier in use."""
        return sum(self.slots[ref] for ref in self.resident)

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str], list[PlaneRef]] = defaultdict(list)
        for ref in sorted(self.home):
            groups[ref.plane, self.home[ref].value, self.condition(ref).value].append(ref)
        lines = [f"on {self.compute.value}, slots of {self.slot_bytes} bytes"]
        lines += [f"  {' '.join(group)} {' '.join(self._ranges(refs))}" for group, refs in sorted(groups.items())]
        return "\n".join(lines)

    def _ranges(self, refs: Iterable[PlaneRef]) -> list[str]:
        """Sorted units of one plane as `0-5`, `7`, `9x4`: neighbours of one size share an entry."""
        spans: list[list[int]] = []  # first, last, slots
        for chunk, slots in ((ref.chunk, self.slots[ref]) for ref in refs):
            if spans and spans[-1][1:] == [chunk - 1, slots]:
                spans[-1][1] = chunk
            else:
                spans.append([chunk, chunk, slots])
        return [
            (f"{first}-{last}" if last > first else f"{first}") + (f"x{slots}" if slots > 1 else "")
            for first, last, slots in spans
        ]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """The snapshot that prints as `text`.

        Raises:
            ValueError: `text` is not the print of a snapshot.
        """
        head, *lines = text.splitlines()
        found = _HEAD.fullmatch(head)
        if not found:
            raise ValueError(f'{head!r} is not the first line of a snapshot, such as "on D, slots of 4096 bytes"')
        home: dict[PlaneRef, Tier] = {}
        slots: dict[PlaneRef, int] = {}
        resident: dict[PlaneRef, CopyState] = {}
        free: set[PlaneRef] = set()
        for line in lines:
            plane, tier, word, *spans = line.strip().split(" ")
            condition = Condition(word)
            for chunk, times in _chunks(spans):
                ref = PlaneRef(chunk, plane)
                if ref in home:
                    raise ValueError(f"{ref} stands twice in a snapshot")
                home[ref], slots[ref] = Tier(tier), times
                if condition in (Condition.FREE, Condition.VOID):
                    free.add(ref)
                if condition is Condition.VOID:
                    resident[ref] = CopyState.HERE if tier == found["compute"] else CopyState.DIRTY
                elif condition not in (Condition.FREE, Condition.AWAY):
                    resident[ref] = CopyState(word)
        return cls(Tier(found["compute"]), int(found["slot_bytes"]), home, slots, resident, frozenset(free))


_HEAD: Final = re.compile(r"on (?P<compute>[DHK]), slots of (?P<slot_bytes>\d+) bytes")
_SPAN: Final = re.compile(r"(\d+)(?:-(\d+))?(?:x(\d+))?")


def _chunks(spans: Iterable[str]) -> Iterable[tuple[int, int]]:
    for span in spans:
        found = _SPAN.fullmatch(span)
        if not found:
            raise ValueError(f'{span!r} is no chunks, such as "0-5", "7" or "9x4"')
        first, last, slots = found.groups()
        for chunk in range(int(first), int(last or first) + 1):
            yield chunk, int(slots or 1)
