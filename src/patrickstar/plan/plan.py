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
A plan starts from a snapshot and leads to one (`plan/snapshot.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from patrickstar.core.machine import Machine
from patrickstar.core.planes import PlaneRef
from patrickstar.plan.actions import Action, parse_action
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

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that prints as `text`. ValueError: `text` is not the print of a plan, or was cut short."""
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
                raise ValueError(f"line {head} in a plan of {len(moments)} lines")
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
