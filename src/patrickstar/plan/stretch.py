"""Stretches: the parts of a step that are planned as one. What the planner is asked for each, what it made, and how far that has come.

Note [Traces of a stretch]
    `Ask.trace` is what is expected to happen: a forecast of the forward and its backward (`tracing/offline.py`), what was measured of such a step
    (`step/known_forwards.py`), or the chunks that the norm or the optimizer's step go through (`Planner.norm_trace`, `Planner.update_trace`).
    `Draft.foreseen` is that with what was added to it: bytes that such a step has taken more, and moments of updates.
    `Draft.trace` has what a device's allocator keeps as well. The plan is made of it, and moments are held against it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.plan.actions import Action, Drop
from patrickstar.plan.plan import Plan
from patrickstar.plan.residency import Residency
from patrickstar.plan.whole_chunks import WholeChunks


class StretchKind(str, Enum):
    """Kinds of stretch: the parts of a step."""

    TRAINING = "training step"
    EVALUATION = "evaluation"
    NORM = "norm"
    UPDATE = "step"
    OUTSIDE = "outside"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A stretch that is about to begin, as it is expected.

    Attributes:
        trace: its moments. start: where every unit is; not changed.
        level_bytes: the most non-model bytes of any moment of any stretch so far. excess_bytes: what such a stretch has taken more than its trace.
        taken_bytes: what the user has taken of the compute tier's budget. kept_bytes: see `PlanBudgets.room_bytes`.
        updates: a trace of updates that are pending, to be woven between the moments. whole: whether chunks are to be updated whole.
        unwanted: gradients that nobody wants once an update has read them. lets_go: what is expected to be let go of before moment `lets_go_at`.
        forwards: of a step, so far or in the last one. is_last: whether it is the last forward of a step, as far as that is as the last one.
    """

    kind: StretchKind
    trace: Trace
    start: Residency
    level_bytes: int = 0
    excess_bytes: int = 0
    taken_bytes: int = 0
    kept_bytes: int | None = None
    updates: Trace | None = None
    whole: bool = False
    unwanted: Collection[PlaneRef] = frozenset()
    lets_go: Collection[PlaneRef] = frozenset()
    lets_go_at: int = 0
    forwards: int = 1
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """A stretch on its way through the passes.

    Attributes:
        foreseen: the trace without what an allocator keeps. frees: (moment, unit) that nobody wants after it.
        lets_go, lets_go_at: as asked, among the moments of the trace as it is now.
        whole_chunks: the chunks that its backward updates whole. plan: None until it is made.
    """

    ask: Ask
    trace: Trace
    foreseen: Trace
    frees: tuple[tuple[int, PlaneRef], ...] = ()
    lets_go: frozenset[PlaneRef] = frozenset()
    lets_go_at: int = 0
    whole_chunks: WholeChunks | None = None
    plan: Plan | None = None

    @property
    def start(self) -> Residency:
        """The place of every unit as the plan begins: with homes for the gradients of chunks that are updated whole."""
        start, whole = self.ask.start, self.whole_chunks
        if whole is None:
            return start
        new = {ref: home for ref, home in whole.homes.items() if ref not in start.home}
        start = start.copy()
        start.grow(new, {ref: whole.slots[ref] for ref in new})
        return start


class Stretch:
    """A stretch that is under way: what the planner made of it, which does not change, and how far it has come.

    Only its own methods change it:

    | change | asked for by |
    |---|---|
    | `open`, `follow` | the pilot: the next moment is there |
    | `depart`, `let_go` | whoever sees that things go otherwise than planned: pilot, executor, room, `Stretches`, training |
    | `reserve` | whoever makes tensors that no trace has: the room, `close`, `optimizer.state_dict()` |
    | `exceed` | the room of a device, which looks at what that has given out |
    | `gives_gradients`, `differentiates`, `finish` | `Training` and `Stretches`, which hear of the backward |

    Args:
        draft: what the planner made; None where nothing is known that could be planned, for the `reason`.
        reserve_bytes: the room that is left to non-model data where moments are decided on the spot.
        gradient_bytes: where parameters are ordinary, so that nobody tells of their uses, for which nothing has to move: what gradients take beside
            what the trace has; None: they are bound by use.

    Attributes:
        followed: the draft, as long as the moments come as its trace has them. reason: why they are decided on the spot; else empty.
        position: moments that have come as planned. room_bytes: what the plan leaves to slots at the last of them, or at the one that is open.
            is_over: whether its backward has ended, or an exception has ended it.
        lets_go: units that the plan has let go of before moment `lets_go_at` of the draft, and nobody has yet.
        let_go_at: the moment before which somebody let go of what the plan keeps; 0: nobody did.
        gave_gradients, makes_graph: whether its backward did that. excess_bytes: by which some moment took more of a device than foreseen.
    """

    def __init__(
        self,
        kind: StretchKind,
        draft: Draft | None = None,
        *,
        reason: str = "",
        reserve_bytes: int = 0,
        gradient_bytes: int | None = None,
    ) -> None:
        self.kind = kind
        self.draft = draft
        self.plan = None if draft is None else draft.plan
        self.trace = None if draft is None else draft.trace
        self.foreseen = None if draft is None else draft.foreseen

        self.followed = draft if gradient_bytes is None else None
        self.gradient_bytes = gradient_bytes
        self.reason = reason
        self.reserve_bytes = (reserve_bytes if draft is None else draft.trace.peak) + (gradient_bytes or 0)
        self.position = 0
        self.room_bytes = 0
        self.is_over = False
        self.let_go_at = 0
        self.gave_gradients = False
        self.makes_graph = False
        self.excess_bytes = 0
        self._opened_at = -1  # the moment before which what must happen has happened already
        self.lets_go = set(draft.lets_go) if draft is not None else set()

    @property
    def complete(self) -> bool:
        """True once every moment of the trace has come, as planned."""
        if self.gradient_bytes is not None:
            return self.is_over
        return self.followed is not None and self.position == len(self.followed.trace.moments)

    @property
    def own_let_go_at(self) -> int:
        """The number, without updates, of the moment before which somebody let go of what was not to stay; 0 where nobody did."""
        moments = self.trace.moments if self.trace is not None else ()
        return self.let_go_at - sum(moment.updates is not None for moment in moments[: self.let_go_at])

    def next_update(self) -> Moment | None:
        """The update that the plan has before the next moment of anything else; None where it has none."""
        draft = self.followed
        if draft is None or self.position == len(draft.trace.moments):
            return None
        moment = draft.trace.moments[self.position]
        return moment if moment.updates is not None else None

    def expects(self, ref: PlaneRef) -> bool:
        """Tells whether the plan has a unit used at the next moment that is no update."""
        if self.followed is None:
            return False
        rest = islice(self.followed.trace.moments, self.position, None)
        following = next((moment.touches for moment in rest if moment.updates is None), ())
        return any(touch.ref == ref for touch in following)

    def open(self, held: Collection[PlaneRef]) -> Sequence[Action] | None:
        """Actions that the plan has before the next moment, to be done at once; None where it cannot be followed yet."""
        draft, plan, number = self.followed, self.plan, self.position
        if draft is None or plan is None or number == len(draft.trace.moments):
            return None
        actions = plan.moments[number]
        if _dropped(actions, held, plan.machine.compute) is not None:
            return None
        self._opened_at = number
        self.room_bytes = plan.machine.budget[plan.machine.compute] - draft.trace.moments[number].nonmodel_bytes
        return actions

    def follow(self, phase: Phase, touches: Sequence[Touch], held: Collection[PlaneRef]) -> Sequence[Action] | None:
        """Actions that the plan has before a moment, which is the next one; None, and a departure, where that is not as planned."""
        draft, plan, number = self.followed, self.plan, self.position
        if draft is None or plan is None:
            return None
        moments = draft.trace.moments
        if number == len(moments):
            self.depart(f"the {self.kind} has more than the {number} ops of its trace")
            return None
        if self.lets_go and number >= draft.lets_go_at:
            self.depart(
                f"{min(self.lets_go)} was not released before op {number} of the {self.kind}, as it was the last time"
            )
            return None
        moment = moments[number]
        if moment.phase is not phase or moment.touches != tuple(touches):
            came = " ".join(map(str, touches))
            self.depart(f"op {number} of the {self.kind} is {phase} {came}, the trace has {moment}")
            return None
        actions: Sequence[Action] = () if self._opened_at == number else plan.moments[number]
        dropped = _dropped(actions, held, plan.machine.compute) if actions else None
        if dropped is not None:
            self.depart(f"{dropped} is still in use at op {number} of the {self.kind}, which its trace does not have")
            return None
        self.room_bytes = plan.machine.budget[plan.machine.compute] - moment.nonmodel_bytes
        self.position += 1
        return actions

    def depart(self, reason: str) -> None:
        """Follows the plan no longer: moments are decided on the spot from here on. The first reason stays."""
        if self.followed is not None:
            self.followed = None
            self.reason = reason

    def let_go(self, ref: PlaneRef) -> bool:
        """Tells whether the plan has it that a unit's contents are let go of now: its slots then stay until the plan gives them back.

        Where the plan has not, the stretch departs.
        """
        if self.followed is None or self.complete:
            return False
        if ref in self.lets_go and self.position == self.followed.lets_go_at:
            self.lets_go.discard(ref)
            return True
        self.let_go_at = self.position
        self.depart(f"{ref} was released before op {self.position} of the {self.kind}, which its plan does not expect")
        return False

    def reserve(self, nbytes: int) -> None:
        """Leaves so much more room where moments are decided on the spot; a negative number gives room back."""
        self.reserve_bytes += nbytes

    def exceed(self, nbytes: int) -> None:
        """Notes that a moment took so much more of a device than was foreseen."""
        self.excess_bytes = max(self.excess_bytes, nbytes)

    def gives_gradients(self) -> None:
        """Notes that a gradient has come: this is part of a step."""
        self.gave_gradients = True

    def differentiates(self) -> None:
        """Notes that a backward of it makes a graph: the step differentiates a gradient."""
        self.makes_graph = True

    def finish(self) -> None:
        """Ends it: its backward has ended, or an exception has. Activations are gone with the graph."""
        self.is_over = True
        self.reserve_bytes = 0


def _dropped(actions: Sequence[Action], held: Collection[PlaneRef], tier: Tier) -> PlaneRef | None:
    """A unit in use that these actions would drop from a tier, if there is one."""
    for action in actions:
        if isinstance(action, Drop) and action.tier is tier and action.of in held:
            return action.of
    return None
