"""Forecasts of forwards, with those blocks bound at once that fit: the outermost, else the blocks inside of these, else none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from patrickstar.core.planes import WEIGHT
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.parameters.blocks import NotInBlocksError, Place
from patrickstar.parameters.changes import UnseenChangeError
from patrickstar.parameters.saved import WeightChangedError
from patrickstar.plan.fit import beyond, pinned_at, worst_moment
from patrickstar.plan.residency import Residency
from patrickstar.step.budgets import Budgets, with_retention
from patrickstar.tracing.offline import Foreseen, OfflineTracer


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingBlocks:
    """Makes forecasts of forwards that are new.

    Attributes:
        named: the parameters of the model. places: its outermost blocks that may be bound.
        start: gives where units are before a forward with this trace.
        taken_bytes: what of the compute tier's budget the user has taken. traced: where all are forecasts of one forward, what it does, by blocks.
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
