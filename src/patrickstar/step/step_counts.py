"""Counts of steps: how many went as planned, how many did not, and why the last of these did not."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from patrickstar.plan.stretch import Stretch, StretchKind

_log = logging.getLogger("patrickstar")


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Counts of steps that have ended. A step is planned where every stretch of it was.

    Attributes:
        planned, reactive: steps that went as planned, and steps that did not. reason: why the last of these did not.
        reasons: why stretches of the step under way did not. was_planned: whether the last step was.
    """

    planned: int = 0
    reactive: int = 0
    reason: str = ""
    reasons: tuple[str, ...] = ()
    was_planned: bool = False

    @property
    def steps(self) -> int:
        """All of them."""
        return self.planned + self.reactive

    def ended(self, stretch: Stretch, explanation: str) -> StepCounts:
        """The counts after a stretch, as it has gone. `explanation`: of a departure of its."""
        if stretch.kind is StretchKind.EVALUATION or (
            stretch.kind is StretchKind.TRAINING and not stretch.gave_gradients
        ):
            return self  # no part of a step: a forward alone, or a backward for other tensors than parameters
        if stretch.reason:
            reason = stretch.reason + explanation
        elif not stretch.complete:
            reason = f"the {stretch.kind} ended after {stretch.position} ops of its trace"
        else:
            return self
        if stretch.kind is not StretchKind.UPDATE:
            return replace(self, reasons=(*self.reasons, reason))
        if self.was_planned:  # an update in a stretch of its own is part of the step that is counted already
            return replace(self, planned=self.planned - 1, was_planned=False)._with_reactive(reason)
        return self

    def step_ended(self) -> StepCounts:
        """The counts after a step: the optimizer has updated, and all that came since the last update was one step."""
        after = replace(self, reasons=(), was_planned=not self.reasons)
        return after._with_reactive(self.reasons[-1]) if self.reasons else replace(after, planned=after.planned + 1)

    def _with_reactive(self, reason: str) -> StepCounts:
        after = replace(self, reactive=self.reactive + 1, reason=reason)
        _log.info("step %d was not as planned: %s", after.steps, reason)
        return after
