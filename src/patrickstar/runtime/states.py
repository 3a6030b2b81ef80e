"""The state of every parameter in the step that is under way (`core/state.py`), and what follows from it where no plan is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from patrickstar.core.layout import Layout
from patrickstar.core.plane import WEIGHT, PlaneRef
from patrickstar.core.state import (
    COMPUTE,
    FREE,
    HOLD,
    HOLD_AFTER_BWD,
    HOLD_AFTER_FWD,
    TensorState,
    chunk_state,
    move,
    next_step,
)

__all__ = ["ParameterStates"]


class ParameterStates:
    """Follows parameters through the transition table, from the events of a step."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        # Of a parameter in tiles, the states are the tiles'.
        self._leaves = {name: layout.leaves(name) for name in layout.slices}
        leaves = [label for labels in self._leaves.values() for label in labels]
        self._states: dict[str, TensorState] = dict.fromkeys(leaves, FREE)
        self._before: dict[str, TensorState] = {}
        self._in_unit: dict[PlaneRef, list[str]] = {}
        for label in leaves:
            self._in_unit.setdefault(layout.weight_units(label)[0], []).append(label)

    def _each(self, names: Iterable[str]) -> Iterator[str]:
        for name in names:
            yield from self._leaves.get(name, (name,))

    def filled(self, name: str) -> None:
        """A parameter has contents."""
        for label in self._leaves[name]:
            if self._states[label] is FREE:
                self._states[label] = move(FREE, HOLD)

    def entered(self, names: Sequence[str]) -> None:
        """Uses of these parameters begin."""
        for name in self._each(names):
            now = self._states[name]
            if now is not COMPUTE:
                self._before[name] = now
                self._states[name] = move(now, COMPUTE)

    def left(self, names: Sequence[str], *, in_forward: bool) -> None:
        """They have ended. A use that a forward has recorded leaves a parameter waiting for the backward."""
        for name in self._each(names):
            if self._states[name] is COMPUTE:
                before = self._before.pop(name)
                self._states[name] = move(COMPUTE, HOLD_AFTER_FWD if in_forward else before)

    def gradient_arrived(self, name: str) -> None:
        """A gradient of this step is there, after a use or without one."""
        for label in self._each([name]):
            now = self._states[label]
            if now is HOLD:
                now = move(now, COMPUTE)
            self._states[label] = move(now, HOLD_AFTER_BWD)
            self._before.pop(label, None)

    def next_step(self, names: Iterable[str] | None = None) -> None:
        """A step begins."""
        for name in self._states if names is None else self._each(names):
            self._states[name] = next_step(self._states[name])

    def is_spent(self, ref: PlaneRef) -> bool:
        """Whether the step needs a weight unit no more: the gradients of all it holds are there."""
        if ref.plane != WEIGHT:
            return False
        return chunk_state(self._states[label] for label in self._in_unit[ref]) is HOLD_AFTER_BWD
