"""Works, which take time, and the actions that a plan may ask for. Each action is one line of text.

    c12.weight H>D x4    Issue of a COPY: a transfer begins; the unit takes four slots
    c3.exp_avg 0>D       Issue of a CREATE: first contents, all zeros; it has no wait
    c3 step@D            Issue of an UPDATE: the optimizer's update of a chunk begins, on this tier
    c12.weight D?        Wait for a COPY: the transfer to this tier must be over now
    c3 step@D?           Wait for an UPDATE
    c12.weight D! x4     Drop: the copy's slots are given back, nothing is transferred

A count of slots is printed where it is not one. A new kind of work is a member of `WorkKind`, a line of text here, and one in this table of what
each reads and writes, as places; `reads` and `writes` are it, and alone know planes.

| work                  | reads                  | writes                                                              |
|-----------------------|------------------------|---------------------------------------------------------------------|
| `COPY` to a tier      | the unit at its source | the unit on the tier                                                |
| `CREATE` on a tier    |                        | the unit on the tier                                                |
| `UPDATE` on a tier    | the chunk's gradient   | its optimizer states and rest, and its part of the weight, all there |

Three rules follow from it, for residency, lanes and plans alike:

- What a work writes is not used until its wait.
- What a work reads is neither written nor dropped until its wait.
- A work may read what an earlier one writes, and comes after it: its wait is then that of a copy which brings it something as well.

Works of one unit that write different parts of it on one tier do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Container
from enum import Enum
from typing import NamedTuple, TypeGuard

from patrickstar.core.machine import Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, REST, STEP, WEIGHT, PlaneRef


class WorkKind(Enum):
    """The kinds of work."""

    COPY = "the transfer of a unit from one tier to its neighbour"
    CREATE = "first contents of a unit, all zeros"
    UPDATE = "the optimizer's update of a chunk, where all that it needs is"

    __hash__ = object.__hash__  # that of an Enum is a call in Python


class Work(NamedTuple):
    """Something that takes time: on lanes, beside what follows its issue.

    Attributes:
        of: the unit; of an update `c3.step`, which has no bytes.
        tier: where it is done; that of a copy is where it arrives.
    """

    kind: WorkKind
    of: PlaneRef
    tier: Tier

    @classmethod
    def update(cls, chunk: int, tier: Tier) -> Work:
        """The optimizer's update of a chunk on a tier."""
        return cls(WorkKind.UPDATE, PlaneRef(chunk, STEP), tier)

    def __str__(self) -> str:
        if self.kind is WorkKind.UPDATE:
            return f"c{self.of.chunk} step@{self.tier.value}"
        return f"{self.of} {self.tier.value}"


class Issue(NamedTuple):
    """Begin a work. What is copied or created takes slots now. `src`: the tier that a copy comes from."""

    work: Work
    src: Tier | None = None
    slots: int = 1

    @classmethod
    def copy(cls, ref: PlaneRef, src: Tier, dst: Tier, slots: int = 1) -> Issue:
        """The issue of a transfer from one tier to its neighbour."""
        return cls(Work(WorkKind.COPY, ref, dst), src, slots)

    @classmethod
    def create(cls, ref: PlaneRef, tier: Tier, slots: int = 1) -> Issue:
        """The issue of the first contents of a unit that has none."""
        return cls(Work(WorkKind.CREATE, ref, tier), None, slots)

    @classmethod
    def update(cls, chunk: int, tier: Tier) -> Issue:
        """The issue of a chunk's update."""
        return cls(Work.update(chunk, tier))

    @property
    def of(self) -> PlaneRef:
        """The unit, or what an update is of."""
        return self.work.of

    def __str__(self) -> str:
        if self.work.kind is WorkKind.UPDATE:
            return str(self.work)
        return f"{self.of} {self.src.value if self.src else 0}>{self.work.tier.value}{_times(self.slots)}"


class Wait(NamedTuple):
    """Wait for a work: one for each."""

    work: Work

    @classmethod
    def copy(cls, ref: PlaneRef, tier: Tier) -> Wait:
        """The wait for the transfer that makes a unit valid on a tier."""
        return cls(Work(WorkKind.COPY, ref, tier))

    @property
    def of(self) -> PlaneRef:
        """The unit, or what an update is of."""
        return self.work.of

    def __str__(self) -> str:
        return f"{self.work}?"


class Drop(NamedTuple):
    """Give a copy's slots back without a transfer: another tier holds the same bytes, or nobody wants them."""

    of: PlaneRef
    tier: Tier
    slots: int = 1

    def __str__(self) -> str:
        return f"{self.of} {self.tier.value}!{_times(self.slots)}"


Action = Issue | Wait | Drop


def is_copy(action: Action) -> TypeGuard[Issue]:
    """Tells whether an action is the issue of a transfer."""
    return isinstance(action, Issue) and action.work.kind is WorkKind.COPY


def slots_taken(action: Action, tier: Tier) -> int:
    """Slots of a tier that an action takes for a copy of a unit there; negative: that it gives back."""
    if isinstance(action, Issue):
        return action.slots if action.work.tier is tier and action.work.kind is not WorkKind.UPDATE else 0
    return -action.slots if isinstance(action, Drop) and action.tier is tier else 0


def _times(slots: int) -> str:
    return "" if slots == 1 else f" x{slots}"


Place = tuple[PlaneRef, Tier, int | None]
"""A unit's bytes on a tier, and the chunk of a weight's run that is meant; None: all of it."""


def reads(issue: Issue, units: Container[PlaneRef]) -> list[Place]:
    """The places that a work reads and leaves as they are. `units`: all that there are."""
    (kind, of, tier), src = issue.work, issue.src
    if kind is WorkKind.UPDATE:
        gradient = PlaneRef(of.chunk, GRAD)
        return [(gradient, tier, None)] if gradient in units else []
    return [] if src is None else [(of, src, None)]


def writes(issue: Issue, units: Container[PlaneRef]) -> list[Place]:
    """The places that a work writes. `units`: all that there are."""
    kind, of, tier = issue.work
    if kind is not WorkKind.UPDATE:
        return [(of, tier, None)]
    places: list[Place] = [(weight_of(of.chunk, units), tier, of.chunk)]
    for plane in (REST, EXP_AVG, EXP_AVG_SQ):
        if (ref := PlaneRef(of.chunk, plane)) in units:
            places.append((ref, tier, None))  # noqa: PERF401  (a call less, for each update)
    return places


def units_of(issue: Issue, units: Container[PlaneRef]) -> tuple[PlaneRef, ...]:
    """The units that a work reads or writes, and first what it is of. `units`: all that there are."""
    of = issue.work.of
    if of in units:
        return (of,)
    return (of, *[unit for unit, _, _ in (*writes(issue, units), *reads(issue, units))])


def weight_of(chunk: int, units: Container[PlaneRef]) -> PlaneRef:
    """The weight whose run a chunk is part of. LookupError: there is none."""
    for head in range(chunk, -1, -1):
        if (ref := PlaneRef(head, WEIGHT)) in units:
            return ref
    raise LookupError(f"there is no weight of chunk {chunk}")
