"""Traces of what one training step touches, moment by moment: the input of every plan.

A trace prints one line a moment:

    trace of 3 moments
    forward wte.weight 4096 c0.weight
    backward wte.weight 4096..81920 c0.grad* c0.weight held c2.weight
    step wte.weight 0 c0.exp_avg* c0.exp_avg_sq* c0.grad c0.weight* updates c0

that is: phase, label, non-model bytes (`4096..81920` where some are alive as the moment begins), what is touched (`*`: written; `@H`: on the
host, below a device), the chunk whose update begins, and what is still in use from earlier moments. A label has its odd characters escaped as
in a URL; an empty one prints as `-`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
from urllib.parse import quote

from patrickstar.core.machine import Tier
from patrickstar.core.planes import EXP_AVG, PlaneRef


class Phase(str, Enum):
    """The part of a step that a moment belongs to."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    STEP = "step"

    def __str__(self) -> str:
        return self.value


class Touch(NamedTuple):
    """A unit that a moment uses. Prints as `c3.grad`, or `c3.grad*` where the moment writes it.

    Its last contents must be on the tier that computes, or on `tier`, one below that: `c3.grad@H*`. Where it is written they are nowhere else.
    """

    ref: PlaneRef
    writes: bool = False
    tier: Tier | None = None

    def __str__(self) -> str:
        return f"{self.ref}{f'@{self.tier.value}' if self.tier else ''}{'*' if self.writes else ''}"


@dataclass(frozen=True, slots=True)
class Moment:
    """One tick of the logical clock. Units are kept sorted, each once, in whatever order they are given.

    Attributes:
        phase, label: where in the step this is; the label is a parameter's name, or empty.
        touches: what must be resident now; of a unit both read and written, the write.
        held: units still in use from earlier moments: they may not move either.
        nonmodel_bytes: peak of everything on the compute tier that is no chunk, from this moment to the next.
        live_bytes: what of that is alive as the moment begins.
        updates: the chunk whose update begins with this moment, and may go on beside those after it.
    """

    phase: Phase
    label: str
    touches: tuple[Touch, ...]
    held: tuple[PlaneRef, ...] = ()
    nonmodel_bytes: int = 0
    live_bytes: int = 0
    updates: int | None = None

    def __post_init__(self) -> None:
        refs = [touch.ref for touch in self.touches]
        if refs != sorted(set(refs)):
            in_order = sorted(self.touches, key=lambda touch: (touch.ref, touch.tier or "", touch.writes))
            touches = {(touch.ref, touch.tier): touch for touch in in_order}
            object.__setattr__(self, "touches", tuple(touches.values()))
        if self.held:
            object.__setattr__(self, "held", tuple(sorted(set(self.held))))

    @property
    def name(self) -> str:
        """Phase and label, as messages name a moment after its number: `backward layers.7.mlp.w1`."""
        return f"{self.phase.value} {self.label}".rstrip()

    @property
    def update_tier(self) -> Tier | None:
        """The tier of the update that begins with this moment, as a touch has it: None for the one that computes."""
        return next(touch.tier for touch in self.touches if touch.ref.plane == EXP_AVG)

    def __str__(self) -> str:
        nonmodel = f"{self.live_bytes}..{self.nonmodel_bytes}" if self.live_bytes else str(self.nonmodel_bytes)
        words = [self.phase.value, _escape(self.label), nonmodel, *map(str, self.touches)]
        if self.updates is not None:
            words += ["updates", f"c{self.updates}"]
        if self.held:
            words += ["held", *map(str, self.held)]
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Trace:
    """The ops of one step, in order."""

    moments: tuple[Moment, ...]

    def __len__(self) -> int:
        return len(self.moments)

    @property
    def peak(self) -> int:
        """The most bytes of activations and workspaces at any op; 0 of an empty trace."""
        return max([moment.nonmodel_bytes for moment in self.moments], default=0)

    def touched(self, plane: str) -> list[PlaneRef]:
        """The units of a plane that some moment touches, in order."""
        return sorted({touch.ref for moment in self.moments for touch in moment.touches if touch.ref.plane == plane})

    def name(self, index: int) -> str:
        """An op's name in messages: `17 backward layers.7.mlp.w1`."""
        return f"{index} {self.moments[index].name}"

    def __str__(self) -> str:
        return "\n".join([f"trace of {len(self.moments)} moments", *map(str, self.moments)])

    def digest(self) -> str:
        """Equal for equal traces: 16 hexadecimal digits over the text."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]


def _escape(label: str) -> str:
    if not label:
        return "-"
    return "%2D" if label == "-" else quote(label, safe="!$&'()*+,/:;=?@[]#~^{}<>")
