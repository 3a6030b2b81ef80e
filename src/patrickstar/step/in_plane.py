"""Gradients of the user's own, in their plane for as long as something is done with all gradients."""

from __future__ import annotations

from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import BoundParameter
from patrickstar.step.gradients import Gradients

__all__ = ["InPlane"]


class InPlane:
    """For a while, the gradients that are the user's own are in the plane too."""

    def __init__(self, binding: Binding, gradients: Gradients) -> None:
        self._binding = binding
        self._gradients = gradients
        self._copied: list[BoundParameter] = []

    def __enter__(self) -> None:
        for name in sorted(self._binding.gradients.own):
            own = self._binding.gradients.own_of(name)
            if own is not None:
                bound = self._binding.by_name[name]
                self._gradients.add(bound, own)
                self._copied.append(bound)

    def __exit__(self, *_: object) -> None:
        for bound in self._copied:
            self._gradients.drop(bound.name)
