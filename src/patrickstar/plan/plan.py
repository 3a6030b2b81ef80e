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
A plan starts from a snapshot and leads to one (`plan/snapshot.py`).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from patrickstar.core.machine import Machine
from patrickstar.core.planes import PlaneRef
from patrickstar.plan.actions import Action
from patrickstar.plan.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions before each op, between two known states.

    Attributes:
        layout: the digest of the layout it is for; policy: the eviction policy that made it.
        start, end: the place of every unit before the first op, and after the last.
        moments: for each op of the trace, the actions to carry out before it, in order.
        frees: (op, unit): units that are void after that op, such as a gradient that has been applied.
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
        lines += [f"{index}: {', '.join(map(str, actions))}" for index, actions in enumerate(self.moments) if actions]
        lines += [f"frees {index}: {', '.join(map(str, refs))}" for index, refs in sorted(self.freed_after().items())]
        return "\n".join([*lines, f"end {self.end}"])

    def digest(self) -> str:
        """Equal for equal plans: 16 hexadecimal digits over the text."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]


def frees_by_moment(frees: Iterable[tuple[int, PlaneRef]]) -> dict[int, list[PlaneRef]]:
    """The units freed after each moment that frees some."""
    freed: dict[int, list[PlaneRef]] = defaultdict(list)
    for index, ref in frees:
        freed[index].append(ref)
    return dict(freed)
