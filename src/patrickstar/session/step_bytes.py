"""Bytes handed to process groups in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class StepBytes:
    """Counts bytes from one step of the optimizer to the next.

    Attributes:
        counters: give all bytes so far, by mesh dimension. last: those of the last step.
    """

    counters: Mapping[str, Callable[[], int]] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    _before: dict[str, int] = field(default_factory=dict)

    def step_ended(self) -> None:
        """Notes the end of a step."""
        now = {name: count() for name, count in self.counters.items()}
        self.last = {name: total - self._before.get(name, 0) for name, total in now.items()}
        self._before = now
