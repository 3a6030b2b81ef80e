"""Parameters by name: reading and writing their values wherever they are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from patrickstar.core.layout import Layout
from patrickstar.core.plane import EXP_AVG, EXP_AVG_SQ, PlaneRef
from patrickstar.core.trace import Phase, Touch
from patrickstar.errors import ConfigError
from patrickstar.nn.binding import Binding
from patrickstar.nn.bound import BoundParameter
from patrickstar.runtime.conductor import Conductor

__all__ = ["Weights"]


class Weights:
    """Values and moments of parameters, one at a time."""

    def __init__(self, binding: Binding, layout: Layout, conductor: Conductor) -> None:
        self._binding = binding
        self._layout = layout
        self._conductor = conductor

    def read(self, name: str) -> Tensor:
        """A copy of a parameter's value, of its shape and strides, fp32."""
        bound = self._binding.by_name[name]
        with self._conductor.lock, self._conductor.apart():
            with self._conductor.making(4 * bound.shape_only.numel()):
                self._conductor.moment(Phase.STEP, name, (Touch(bound.ref),))
            return bound.over(self._conductor.tensor(bound.ref)).clone()

    def write(self, name: str, value: Tensor) -> None:
        """Sets a parameter's value, rounded to fp32. Counts as a change in place.

        Raises:
            ConfigError: no such parameter, or another shape.
        """
        bound = self._binding.by_name.get(name)
        if bound is None:
            raise ConfigError(f"there is no parameter {name!r}")
        if value.shape != bound.shape_only.shape:
            raise ConfigError(f"{name} has shape {tuple(bound.shape_only.shape)}, the value {tuple(value.shape)}")
        with self._conductor.lock:
            with self._conductor.quiet():
                self.fill(bound, value)
            self._binding.changed_by_update([name])

    def fill(self, bound: BoundParameter, value: Tensor) -> None:
        """Copies a value into a parameter's place."""
        self._conductor.moment(Phase.STEP, bound.name, (Touch(bound.ref, True),))
        bound.over(self._conductor.tensor(bound.ref)).copy_(value)

    def moment_pieces(self, name: str, plane: str, *, writes: bool = False) -> Iterator[Tensor]:
        """A parameter's first or second moment as 1-D pieces in slot order; each valid until the next is asked for."""
        assert plane in (EXP_AVG, EXP_AVG_SQ)
        for part in self._layout.parts(name):
            ref = PlaneRef(part.chunk, plane)
            self._conductor.moment(Phase.STEP, name, (Touch(ref, writes),))
            yield self._conductor.tensor(ref)[part.start : part.stop]

    def read_moment(self, name: str, plane: str) -> Tensor:
        """A copy of a parameter's first or second moment, of its shape and strides."""
        bound = self._binding.by_name[name]
        with self._conductor.lock, self._conductor.apart():
            whole = torch.empty_strided(bound.shape_only.shape, bound.shape_only.stride())
            flat, at = bound.flat(whole), 0
            with self._conductor.making(whole.nbytes):
                for piece in self.moment_pieces(name, plane):
                    flat[at : at + piece.numel()].copy_(piece)
                    at += piece.numel()
            return whole

    def clear_moments(self, name: str) -> None:
        """A parameter's moments are as before its first update: zero."""
        with self._conductor.lock, self._conductor.quiet():
            for plane in (EXP_AVG, EXP_AVG_SQ):
                for target in self.moment_pieces(name, plane, writes=True):
                    target.zero_()

    def write_moment(self, name: str, plane: str, value: Tensor) -> None:
        """Sets a parameter's first or second moment, rounded to fp32."""
        bound = self._binding.by_name[name]
        with self._conductor.lock, self._conductor.quiet():
            flat, at = bound.flat(value.to(torch.float32)), 0
            for target in self.moment_pieces(name, plane, writes=True):
                target.copy_(flat[at : at + target.numel()])
                at += target.numel()
