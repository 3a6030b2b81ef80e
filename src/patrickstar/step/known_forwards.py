"""Knowledge of one kind of forward: a forecast at first, and then what steps of that kind have done.

Note [Courses]
    Steps of one kind mostly go one way, and their trace is that of the way they went. Two things make several ways of it that take turns, and
    there the trace of the last step is no model for the next.

    A loss with a gradient in it (a gradient penalty) goes through the weights twice. No forward shows that, and regularisation may come at every
    sixteenth step only. Such steps have a trace of their own, which is measured at the first of them. The next step is expected to be
    one too where the last was; until a step has shown that they do not follow each other.

    A forward may branch on numbers that it draws (layers that are dropped by chance). Its forecast is that of the branches that need most, and
    holds for all of them. What was measured of a step takes its place only where the forward was as foreseen, and so took these branches.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from patrickstar.core.planes import GRAD, PlaneRef
from patrickstar.core.trace import Phase, Trace
from patrickstar.plan.residency import Residency
from patrickstar.plan.stretch import Stretch
from patrickstar.tracing.inputs import Signature

BEING_MEASURED = "the forward did not go as its trace; it is being measured"
_MEASUREMENTS = 3
_NOT_MEASURED = (
    "the gradient that the last step differentiated (create_graph=True) shows in no forward: it is being measured"
)


@dataclass(slots=True)
class KnownForward:
    """Knowledge of one kind of forward, or of one course of its steps. See Note [Courses].

    Attributes:
        trace: what the forward is expected to do. offline: the forecast at first. measured: what the forward did when it was last recorded.
        reason: why there is no trace. by_chance: whether the forward branches on numbers that it draws.
        by_use: why its bits would be others if nobody saw each use of a parameter; empty where they would not.
        measurements: how often a measured trace has taken the place of another. departures: steps in a row that did not go as the trace.
        measure_next: whether the next step is to be measured. reserved: the trace for whose gradients there is room.
        lets_go_at: the moment, between forward and backward, before which gradients of the step before are let go of; 0: there is none.
        excess_bytes: by how much more a step of this kind took of a device than its trace has, at the worst of its moments. knows_workspaces:
            whether a whole step has shown that: what kernels take is known then, and nothing is left for it beside.
        blocks: paths of the modules that are bound at once. twice: what is known of those steps that differentiate a gradient; None before the first.
    """

    trace: Trace | None = None
    offline: Trace | None = None
    measured: Trace | None = None
    reason: str = ""
    by_chance: bool = False
    by_use: str = ""
    measurements: int = 0
    departures: int = 0
    measure_next: bool = False
    reserved: Trace | None = None
    lets_go_at: int = 0
    excess_bytes: int = 0
    knows_workspaces: bool = False
    blocks: tuple[str, ...] = ()
    twice: KnownForward | None = None

    _was_twice: bool = field(default=False, repr=False)
    _stays_twice: bool = field(default=True, repr=False)

    @property
    def expected(self) -> KnownForward:
        """Knowledge of the course that the next step is expected to take."""
        return self.twice if self.twice is not None and self._was_twice and self._stays_twice else self

    def excess_beyond(self, share_bytes: int) -> int:
        """Bytes that plans have beside the trace: what such a step took more; less the share that is left for that until all of it is known."""
        return self.excess_bytes if self.knows_workspaces else max(0, self.excess_bytes - share_bytes)

    def let_go(self, state: Residency) -> frozenset[PlaneRef]:
        """The gradients that will be let go of in the middle of a forward and its backward, if these go as the last time."""
        if self.trace is None or not 0 < self.lets_go_at < len(self.trace.moments):
            return frozenset()
        return frozenset(ref for ref in state.home if ref.plane == GRAD and not state.is_free(ref))

    def learn(self, stretch: Stretch, recorded: Trace | None) -> None:
        """Learns from a step of this kind, which went as the stretch says. `recorded`: what it did, with its backward, where that was recorded."""
        expected, course = self.expected, self._course_of(stretch)
        if recorded is not None:
            expected.measure_next = False
            course.measured = recorded
        if self.by_chance and not _forward_is(course.trace or self.trace, stretch, recorded):
            return
        if course is not expected or (recorded is None and course.trace is None):
            course.trace = course.trace or recorded
            return
        course.departures = course.departures + 1 if stretch.reason else 0
        # One odd step is no model for the next; two in a row are.
        odd = course.departures > 1 and course.measurements < _MEASUREMENTS
        if recorded is None:
            course.measure_next = odd
        elif course.trace is None or odd:
            course.measurements += 1
            course.trace = recorded

    def explain(self, stretch: Stretch) -> str:
        """The reason why a step departed from its trace, to be added to the place where it did; empty where that is not known."""
        if stretch.draft is None or stretch.reason == BEING_MEASURED:
            return ""
        if stretch.makes_graph and stretch.draft.ask.trace is self.trace:
            return "; it differentiates a gradient (create_graph=True), which no forward shows: what was measured is expected of the next such step"
        if self.by_chance and not _forward_is(stretch.trace, stretch, None):
            return (
                "; the forward branches on numbers that it draws, and the trace is that of the branches which need most"
            )
        return ""

    def _course_of(self, stretch: Stretch) -> KnownForward:
        """The course that a step has taken, which counts as the last one from now on."""
        if not stretch.gave_gradients:
            return self
        if self._was_twice:
            self._stays_twice = stretch.makes_graph
        self._was_twice = stretch.makes_graph
        if not stretch.makes_graph:
            return self
        if self.twice is None:
            self.twice = KnownForward(reason=_NOT_MEASURED)
        return self.twice


def _forward_is(trace: Trace | None, stretch: Stretch, recorded: Trace | None) -> bool:
    """Tells whether a step's forward was that of the trace."""
    if trace is None:
        return True
    if recorded is not None:
        return _forward_of(recorded) == _forward_of(trace)
    return not stretch.reason or stretch.position >= len(_forward_of(trace))


def _forward_of(trace: Trace) -> list[Hashable]:
    return [moment.touches for moment in trace.moments if moment.phase is Phase.FORWARD]


def like_a_larger_one(key: Signature, known: Mapping[Signature, KnownForward]) -> KnownForward:
    """Knowledge of a new kind of forward: that of the least trace of kinds whose shapes are no smaller. It needs no more."""
    larger = [entry for other, entry in known.items() if entry.trace is not None and other.dominates(key)]
    least = min(larger, key=lambda entry: entry.trace.peak if entry.trace is not None else 0, default=KnownForward())
    return KnownForward(
        trace=least.trace,
        by_chance=least.by_chance,
        by_use=least.by_use,
        excess_bytes=least.excess_bytes,
        knows_workspaces=least.knows_workspaces,
        blocks=least.blocks,
    )
