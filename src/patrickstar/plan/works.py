"""The table of what each kind of work reads and writes, as places: the only one that knows planes.

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

from patrickstar.core.machine import Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, REST, WEIGHT, PlaneRef
from patrickstar.plan.actions import Issue, WorkKind

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
            places.append((ref, tier, None))  # noqa: PERF401
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
