"""Kinds of forward that a session has met: what is expected of the next one of each, and what its steps have shown."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from patrickstar.core.planes import GRAD, WEIGHT
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.errors import BudgetError
from patrickstar.parameters.blocks import NotInBlocksError, Place
from patrickstar.parameters.changes import UnseenChangeError
from patrickstar.parameters.registered import Registered
from patrickstar.parameters.saved import WeightChangedError
from patrickstar.plan.fit import beyond, expect_room, pinned_at, within, worst_moment
from patrickstar.plan.residency import Residency
from patrickstar.plan.stretch import Stretch, StretchKind
from patrickstar.step.budgets import Budgets, with_retention
from patrickstar.step.known_forwards import KnownForward, like_a_larger_one
from patrickstar.step.late_planes import LatePlanes
from patrickstar.step.room import Room
from patrickstar.step.whole import Whole
from patrickstar.tracing.inputs import Signature, bounded, can_be_traced, refused, signature
from patrickstar.tracing.offline import Foreseen, OfflineTracer
from patrickstar.tracing.twin import CannotTrace
from patrickstar.units import format_bytes

_KEPT_KINDS = 64
_UNKNOWN_SHARE = 4
_UNTRACEABLE = "the forward cannot be traced: {}"
_log = logging.getLogger("patrickstar")


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingBlocks:
    """Makes forecasts of forwards that are new.

    Attributes:
        named: the parameters of the model. places: its outermost blocks that may be bound.
        start: gives where units are before a forward with this trace.
        taken_bytes: what of the compute tier's budget the user has taken (gradients assigned as `p.grad`, views of those in chunks).
        traced: where all are forecasts of one forward, what it does, by blocks.
    """

    model: nn.Module
    named: Mapping[str, nn.Parameter]
    tracer: OfflineTracer
    budgets: Budgets
    places: tuple[Place, ...]
    start: Callable[[Trace], Residency]
    taken_bytes: Callable[[], int] = lambda: 0
    traced: dict[frozenset[str], Foreseen] | None = None

    def foresee(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, in_blocks: bool
    ) -> tuple[Foreseen, tuple[str, ...]]:
        """A forecast, as the process sees it, and the paths of the blocks that are bound in it.

        Raises:
            CannotTrace: there is none. BudgetError: gradients have no room.
        """
        places = self.places if in_blocks else ()
        while True:
            paths = tuple(place.path for place in places)
            try:
                foreseen = self.foresee_in(paths, args, kwargs)
            except (UnseenChangeError, NotInBlocksError, WeightChangedError):
                if not places:
                    raise
                places = ()  # only by use it shows which operation does what
                continue
            smaller = self._smaller(places, foreseen.trace)
            if smaller == places:
                return foreseen, paths
            places = smaller

    def foresee_in(self, paths: Collection[str], *inputs: Any) -> Foreseen:
        """A forecast with these blocks bound, whether they fit or not. Raises what the tracer raises."""
        blocks = frozenset(paths)
        foreseen = None if self.traced is None else self.traced.get(blocks)
        if foreseen is None:
            foreseen = self.tracer.foresee(self.model, self.named, *inputs, blocks=paths)
            if self.traced is not None:
                self.traced[blocks] = foreseen
        return replace(foreseen, trace=with_retention(foreseen.trace, self.budgets))

    def unseen(self, reserve_bytes: int) -> tuple[str, ...]:
        """The paths of blocks that are bound in a forward of which there is no forecast, for which so much is left beside each."""
        places, layout = self.places, self.tracer.layout
        while True:
            moments = [
                Moment(Phase.FORWARD, min(place.names), tuple(touches), nonmodel_bytes=reserve_bytes)
                for place in places
                for touches in [[Touch(ref) for name in place.names for ref in layout.weight_units(name)]]
            ]
            smaller = self._smaller(places, Trace(tuple(moments)))
            if smaller == places:
                return tuple(place.path for place in places)
            places = smaller

    def _smaller(self, places: tuple[Place, ...], trace: Trace) -> tuple[Place, ...]:
        """The places but those for which some moment has no room, with what is inside of them; the same where all fit, or nothing is inside."""
        if not places:
            return places
        start, layout = self.start(trace), self.tracer.layout
        need = worst_moment(trace, start=start, trained=torch.is_grad_enabled())
        machine = self.budgets.machine_for(need.nbytes, taken_bytes=self.taken_bytes())
        moments = beyond(trace, machine.budget[machine.compute], start=start)
        pinned = {ref for moment in moments for ref in pinned_at(moment) if ref.plane == WEIGHT}
        held = {name for ref in pinned for name in layout.run_of(ref.chunk).tensors}
        for names in ({moment.label for moment in moments}, held):
            smaller = tuple(inner for place in places for inner in place.without(names))
            if smaller != places:
                return smaller
        return places


@dataclass(eq=False)
class KnownForwards:
    """The kinds of forward that a session has met, by signature.

    Attributes:
        fitting: makes the forecast of a new kind. late_planes: has room for gradients that must wait. room: whose level rises with what a kind takes.
        whole: the parameters as long as they keep their bytes.
        inputs: of the last forward that was trained, where they are kept: for a forecast of it on other ranks.
    """

    fitting: FittingBlocks
    late_planes: LatePlanes
    room: Room
    whole: Whole
    keeps_inputs: bool = False
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]] | None = field(default=None, init=False)
    kinds: OrderedDict[Signature, KnownForward] = field(default_factory=OrderedDict, init=False)
    _bounds: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary, init=False)  # by cache
    _refused: set[Signature] = field(default_factory=set, init=False)  # with more in a cache than there was room for

    def expect(self, registered: Registered, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> KnownForward:
        """Knowledge of a forward that is about to begin. BudgetError: it does not fit, or its gradients do not."""
        if self.keeps_inputs and torch.is_grad_enabled():
            self.inputs = args, kwargs
        for inputs, is_own in bounded(kwargs, registered.model, self._bounds):
            if not can_be_traced((args, inputs)):
                why = _UNTRACEABLE.format("a fake-tensor trace could change its inputs")
                unknown = KnownForward(reason=why, blocks=self._unseen())
                self._reserve(unknown)
                return unknown
            key = signature(registered.modules, registered.parameters, args, inputs)
            if key in self._refused and not is_own:
                continue
            try:
                return self._expect(key, args, inputs)
            except BudgetError as refusal:
                if is_own:
                    raise refused(refusal, kwargs) from None
                self._refused.add(key)
        raise AssertionError("a forward is traced as it is")

    def _expect(self, key: Signature, *inputs: Any) -> KnownForward:
        """Knowledge of the kind of forward with a signature. Raises what `expect` raises."""
        known = self.kinds.get(key)
        if known is None:
            known = like_a_larger_one(key, self.kinds)
            if known.trace is None:
                self._foresee(known, *inputs)
        # Refused before it is remembered: a smaller batch may come next, or the same one with more room.
        self._reserve(known.expected)
        self.kinds[key] = known
        self.kinds.move_to_end(key)
        if len(self.kinds) > _KEPT_KINDS:
            self.kinds.popitem(last=False)
        if known.trace is not None:
            self.room.rise(known.trace.peak)
        return known

    def _foresee(self, known: KnownForward, *inputs: Any) -> None:
        try:
            foreseen, known.blocks = self.fitting.foresee(*inputs, in_blocks=bool(self.whole.why))
        except CannotTrace as problem:
            known.reason, known.blocks = _UNTRACEABLE.format(problem), self._unseen()
            _log.info("no trace for this forward (%s): it runs unplanned once and is measured", problem)
            return
        known.trace = known.offline = foreseen.trace
        known.by_chance, known.by_use = foreseen.by_chance, foreseen.by_use
        start = self.late_planes.with_room_for(known.trace)
        need = worst_moment(known.trace, start=start, trained=torch.is_grad_enabled())
        expect_room(need, self.fitting.budgets.machine_for(need.nbytes, taken_bytes=self.fitting.taken_bytes()))

    def _unseen(self) -> tuple[str, ...]:
        return self.fitting.unseen(self.reserve_bytes()) if self.whole.why else ()

    def reserve_bytes(self) -> int:
        """Bytes that are left to a forward of which nothing is known: what any has taken, or a share of the budget where none is known."""
        is_unknown = self.room.level_bytes <= self.fitting.budgets.passes.update
        unknown = (
            (self.fitting.budgets.room_bytes() - self.fitting.taken_bytes()) // _UNKNOWN_SHARE if is_unknown else 0
        )
        return max(self.room.level_bytes, unknown)

    def _reserve(self, known: KnownForward) -> None:
        """Makes room for the gradients that a backward of this forward keeps. See Note [Homes of gradients]."""
        if torch.is_grad_enabled() and (known.trace is None or known.reserved is not known.trace):
            self.late_planes.reserve(known.trace, known.reason)
            known.reserved = known.trace

    def learn(self, known: KnownForward, stretch: Stretch, recorded: Trace, *, state: Residency) -> None:
        """Learns from a step that was recorded, where it has come to its end."""
        recorded = with_retention(recorded, self.fitting.budgets)
        whole = stretch.kind is StretchKind.EVALUATION or any(one.phase is Phase.BACKWARD for one in recorded.moments)
        if not recorded.moments or not whole:
            known.expected.measure_next = False
            return
        self.room.rise(recorded.peak)
        updated = stretch.draft.whole_chunks if stretch.draft is not None and stretch.reason else None
        if updated is not None and updated.homes.keys() & recorded.touched(GRAD):
            # Some chunks were updated whole and some were not: no later step goes like that, or has homes for these gradients.
            known.learn(stretch, None)
            return
        if stretch.reason:
            recorded = self._as_it_ran(recorded, state, is_first=known.expected.measured is None)
        known.learn(stretch, recorded)

    def _as_it_ran(self, recorded: Trace, state: Residency, *, is_first: bool) -> Trace:
        """The trace of a step that has run, for plans of later ones, none of which is to be refused for what this one took beside chunks."""
        budget = self.fitting.budgets.room_bytes(kept_bytes=0) - self.fitting.taken_bytes()
        need = worst_moment(recorded, start=state, trained=True)
        if self.fitting.budgets.stream_device is not None or need.nbytes <= budget:
            return recorded
        if is_first:
            needed, has, moment = format_bytes(need.nbytes), format_bytes(budget), need.moment
            _log.warning("a step took more than any trace showed: %s at op %s; its budget is %s", needed, moment, has)
        return within(recorded, budget, start=state)
