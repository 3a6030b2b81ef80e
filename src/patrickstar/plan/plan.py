"""A plan: what to do before each moment of a trace. Immutable, comparable, printable; the text parses back.

    plan of 300 moments by next-use
    layout 0f3a5c7e9b1d2468
    machine H: H=50331648 K=1073741824
    start on H, slots of 4194304 bytes
      weight K away 0-29
    0: c0.weight K>H, c0.weight H?
    17: c3.weight H!, c9.weight K>H, c9.weight H?
    frees 21: c3.grad
    end on H, slots of 4194304 bytes
      weight K away 0-28
      weight K clean 29

Moments without actions are left out. `frees` names units that nobody wants any more once that moment is over.

A snapshot, where a plan starts from and what it leads to, prints a line per plane, home and condition:

    on D, slots of 4096 bytes
      exp_avg H free 0-7
      weight H away 0-2 3x4
      weight H dirty 7

that is: of the weights, at home on the host, the unit of chunk 7 also has a copy on the device that is newer; those of
chunks 0 to 2 and the run of four chunks from chunk 3 on are at home only; no first moment has contents yet.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from types import MappingProxyType
from typing import Final

from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.plan.actions import Action, parse_action


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions before each moment, between two known states.

    Attributes:
        layout: the digest of the layout it is for; policy: the eviction policy that made it.
        start, end: where every unit is before the first moment, and after the last.
        moments: for each moment of the trace, the actions to carry out before it, in order.
        frees: (moment, unit): what is void once that moment is over, such as a gradient that has been applied.
    """

    layout: str
    policy: str
    machine: Machine
    start: Snapshot
    moments: tuple[tuple[Action, ...], ...]
    end: Snapshot
    frees: tuple[tuple[int, PlaneRef], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "frees", tuple(sorted(self.frees)))

    def actions(self) -> Iterator[Action]:
        """All actions in order."""
        return (action for actions in self.moments for action in actions)

    def freed_after(self) -> dict[int, list[PlaneRef]]:
        """`frees` by moment: the units to mark free once it is over."""
        return frees_by_moment(self.frees)

    def __str__(self) -> str:
        lines = [f"plan of {len(self.moments)} moments by {self.policy}"]
        lines += [f"layout {self.layout}", f"machine {self.machine}", f"start {self.start}"]
        lines += [f"{index}: {_line(actions)}" for index, actions in enumerate(self.moments) if actions]
        lines += [f"frees {index}: {', '.join(map(str, refs))}" for index, refs in sorted(self.freed_after().items())]
        return "\n".join([*lines, f"end {self.end}"])

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that prints as `text`.

        Raises:
            ValueError: `text` is not the print of a plan, or was cut short.
        """
        found = _PLAN.fullmatch(text.strip())
        if not found:
            raise ValueError(f"{text[:40]!r}... is not the print of a whole plan")
        moments: list[tuple[Action, ...]] = [()] * int(found["n_moments"])
        frees: list[tuple[int, PlaneRef]] = []
        for line in found["body"].splitlines():
            head, _, rest = line.partition(": ")
            if head.startswith("frees "):
                index = int(head.removeprefix("frees "))
                frees += [(index, PlaneRef.parse(ref)) for ref in rest.split(", ")]
            elif int(head) >= len(moments):
                raise ValueError(f"moment {head} in a plan of {len(moments)} moments")
            else:
                moments[int(head)] = tuple(map(parse_action, rest.split(", ")))
        return cls(
            layout=found["layout"],
            policy=found["policy"],
            machine=Machine.parse(found["machine"]),
            start=Snapshot.parse(found["start"]),
            moments=tuple(moments),
            end=Snapshot.parse(found["end"]),
            frees=tuple(frees),
        )

    def digest(self) -> str:
        """Equal for equal plans: 16 hexadecimal digits over the text."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def diff(self, other: Plan) -> list[str]:
        """Differences of `other`: two lines, `-` and `+`, per thing that differs; empty for equal plans."""
        lines: list[str] = []
        pairs: list[tuple[str, object, object]] = [
            ("moments", len(self.moments), len(other.moments)),
            ("policy", self.policy, other.policy),
            ("layout", self.layout, other.layout),
            ("machine", self.machine, other.machine),
            ("start", self.start, other.start),
        ]
        for index, (mine, theirs) in enumerate(zip_longest(self.moments, other.moments, fillvalue=())):
            pairs.append((f"moment {index}:", _line(mine) or "nothing", _line(theirs) or "nothing"))
        pairs += [("frees", self._frees_line(), other._frees_line()), ("end", self.end, other.end)]
        for what, ours, its in pairs:
            if ours != its:
                lines += [f"- {what} {ours}", f"+ {what} {its}"]
        return lines

    def _frees_line(self) -> str:
        return ", ".join(f"{ref} after {index}" for index, ref in self.frees) or "nothing"


_PLAN: Final = re.compile(
    r"plan of (?P<n_moments>\d+) moments by (?P<policy>\S+)\n"
    r"layout (?P<layout>\S+)\nmachine (?P<machine>[^\n]+)\n"
    r"start (?P<start>on [^\n]+(?:\n  [^\n]+)*)\n"
    r"(?P<body>(?:(?:frees )?\d+: [^\n]+\n)*)"
    r"end (?P<end>on [^\n]+(?:\n  [^\n]+)*)"
)


def frees_by_moment(frees: Iterable[tuple[int, PlaneRef]]) -> dict[int, list[PlaneRef]]:
    """The units freed after each moment that frees some."""
    freed: dict[int, list[PlaneRef]] = defaultdict(list)
    for index, ref in frees:
        freed[index].append(ref)
    return dict(freed)


def _line(actions: tuple[Action, ...]) -> str:
    return ", ".join(map(str, actions))


class CopyState(Enum):
    """State of a unit's copy on the compute tier."""

    HERE = "here"  # the compute tier is its home: never evicted
    CLEAN = "clean"  # its home below holds the same bytes: may be dropped
    DIRTY = "dirty"  # newer than its home: must be written back before it is dropped


class Condition(Enum):
    """Place of a unit's contents, and whether the unit takes slots of the compute tier."""

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
        """The condition of a unit."""
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
