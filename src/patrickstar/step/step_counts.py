"""Counts of steps: how many went as planned, how many did not, and why the last of these did not."""

from __future__ import annotations

import logging

from patrickstar.plan.stretch import Stretch, StretchKind

__all__ = ["StepCounts"]

_log = logging.getLogger("patrickstar")


class StepCounts:
    """Counts steps as they end. A step is planned where every stretch of it was.

    Attributes:
        planned, reactive: steps that went as planned, and steps that did not. reason: why the last of these did not.
    """

    def __init__(self) -> None:
        self.planned = 0
        self.reactive = 0
        self.reason = ""
        self._reasons: list[str] = []  # of the step under way
        self._was_planned = False

    @property
    def steps(self) -> int:
        """All of them."""
        return self.planned + self.reactive

    def ended(self, stretch: Stretch, explanation: str) -> None:
        """Notes how a stretch has gone, and what explains a departure of its."""
        if stretch.kind is StretchKind.EVALUATION or (
            stretch.kind is StretchKind.TRAINING and not stretch.gave_gradients
        ):
            return  # no part of a step: a forward alone, or a backward for other tensors than parameters
        if stretch.reason:
            reason = stretch.reason + explanation
        elif not stretch.complete:
            reason = f"the {stretch.kind} ended after {stretch.position} ops of its trace"
        else:
            return
        if stretch.kind is not StretchKind.UPDATE:
            self._reasons.append(reason)
        elif self._was_planned:  # an update in a stretch of its own is part of the step that is counted already
            self._was_planned = False
            self.planned -= 1
            self._count_reactive(reason)

    def step_ended(self) -> None:
        """Counts a step: the optimizer has updated, and all that came since the last update was one step."""
        reasons, self._reasons = self._reasons, []
        self._was_planned = not reasons
        if reasons:
            self._count_reactive(reasons[-1])
        else:
            self.planned += 1

    def _count_reactive(self, reason: str) -> None:
        self.reactive += 1
        self.reason = reason
        _log.info("step %d was not as planned: %s", self.steps, reason)
