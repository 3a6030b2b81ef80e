"""A plan: what to do before each moment of a trace. Immutable, comparable, printable.

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
A plan starts from a snapshot and leads to one.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from types import MappingProxyType

from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.plan.actions import Action


class Condition(str, Enum):
    """Condition of a unit as the tier that computes sees it; the last three also of a copy on a tier between that and its home."""

    FREE = "free"  # no contents, no slots
    VOID = "void"  # no contents any more; its slots are yet to be given back
    AWAY = "away"  # its last contents are below, and it has no slots
    HERE = "here"  # this is its home
    CLEAN = "clean"  # a tier below holds the same bytes: may be dropped
    DIRTY = "dirty"  # newer than everything below: must be written back before it is dropped
    STALE = "stale"  # newer contents are elsewhere; its slots are yet to be given back

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a `Residency` between two moments: what a plan starts from, and what it leads to. It prints a line per plane, home and condition:

        on D, slots of 4096 bytes
          exp_avg H free 0-7
          exp_avg_sq K away,clean 2
          weight H away 0-2 3x4
          weight H away:H>D 5
          weight H dirty 7

    A word after the comma is of a copy on the host, one after the colon the way of a transfer; `3x4` is a run of four chunks.

    Attributes:
        compute: the tier that computes; slot_bytes: bytes of one slot.
        home, slots: of every unit, the tier it rests on and the slots it takes.
        newest: the tiers that hold a unit's last contents; a unit that is not there has none.
        taken: by tier, the units that have slots there: on the tier that computes all that are there, below it those whose home is another.
        in_flight: transfers that have been issued and not been waited for: from where, and to where.
    """

    compute: Tier
    slot_bytes: int
    home: Mapping[PlaneRef, Tier]
    slots: Mapping[PlaneRef, int]
    newest: Mapping[PlaneRef, frozenset[Tier]]
    taken: Mapping[Tier, Collection[PlaneRef]]
    in_flight: Mapping[PlaneRef, tuple[Tier, Tier]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("home", "slots", "newest", "in_flight"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        taken = {tier: frozenset(self.taken.get(tier, ())) for tier in (self.compute, Tier.HOST)}
        object.__setattr__(self, "taken", MappingProxyType(taken))

    def condition(self, ref: PlaneRef, tier: Tier | None = None) -> Condition:
        """The condition of a unit on a tier that has slots; None: on the one that computes."""
        tier, newest = tier or self.compute, self.newest.get(ref, frozenset())
        if ref not in self.taken[tier] or (ref in self.in_flight and self.in_flight[ref][1] is tier):
            return Condition.AWAY if newest else Condition.FREE
        if tier not in newest:
            return Condition.STALE if newest or tier is not self.compute else Condition.VOID
        if self.home[ref] is tier:
            return Condition.HERE
        return Condition.CLEAN if newest - {self.compute, tier} else Condition.DIRTY

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str], list[PlaneRef]] = defaultdict(list)
        for ref in sorted(self.home):
            groups[ref.plane, self.home[ref].value, self._word(ref)].append(ref)
        lines = [f"on {self.compute.value}, slots of {self.slot_bytes} bytes"]
        lines += [f"  {' '.join(group)} {' '.join(self._ranges(refs))}" for group, refs in sorted(groups.items())]
        return "\n".join(lines)

    def _word(self, ref: PlaneRef) -> str:
        here, *below = (self.condition(ref, tier) for tier in self.taken)
        beside = "".join(f",{word}" for word in below if word not in (Condition.FREE, Condition.AWAY))
        flight = self.in_flight.get(ref)
        return f"{here}{beside}" + (f":{flight[0]}>{flight[1]}" if flight else "")

    def _ranges(self, refs: Iterable[PlaneRef]) -> list[str]:
        """Sorted units of one plane as `0-5`, `7`, `9x4`: neighbours of one size share an entry."""
        words = []
        # Where each chunk is one more than the chunk before, chunk and place differ by the same number.
        for (_, slots), span in groupby(enumerate(refs), lambda one: (one[1].chunk - one[0], self.slots[one[1]])):
            first, *rest = [ref.chunk for _, ref in span]
            words.append((f"{first}-{rest[-1]}" if rest else f"{first}") + (f"x{slots}" if slots > 1 else ""))
        return words


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions before each op, between two known states.

    Attributes:
        layout: the digest of the layout it is for; policy: the eviction policy that made it.
        start, end: the place of every unit before the first op, and after the last.
        moments: for each op of the trace, the actions to carry out before it, in order.
        frees: (op, unit), sorted: units that are void after that op, such as a gradient that has been applied.
    """

    layout: str
    policy: str
    machine: Machine
    start: Snapshot
    moments: tuple[tuple[Action, ...], ...]
    end: Snapshot
    frees: tuple[tuple[int, PlaneRef], ...] = ()

    def actions(self) -> Iterator[Action]:
        """All actions in order."""
        return (action for actions in self.moments for action in actions)

    def __str__(self) -> str:
        lines = [f"plan of {len(self.moments)} moments by {self.policy}"]
        lines += [f"layout {self.layout}", f"machine {self.machine}", f"start {self.start}"]
        lines += [f"{index}: {', '.join(map(str, actions))}" for index, actions in enumerate(self.moments) if actions]
        freed = sorted(frees_by_moment(self.frees).items())
        lines += [f"frees {index}: {', '.join(map(str, refs))}" for index, refs in freed]
        return "\n".join([*lines, f"end {self.end}"])

    def digest(self) -> str:
        """Equal for equal plans: 16 hexadecimal digits over the text."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]


def frees_by_moment(frees: Iterable[tuple[int, PlaneRef]]) -> dict[int, list[PlaneRef]]:
    """The units to mark free once a moment is over, by moment."""
    freed: dict[int, list[PlaneRef]] = defaultdict(list)
    for index, ref in frees:
        freed[index].append(ref)
    return dict(freed)
