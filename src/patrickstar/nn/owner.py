"""Whom the binding asks and tells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from patrickstar.core.plane import PlaneRef
from patrickstar.nn.assembled import AssembledOwner
from patrickstar.nn.bound import BoundParameter
from patrickstar.nn.gradient_access import GradientOwner
from patrickstar.nn.leases import AssembledKey, Key, WeightKey
from patrickstar.nn.lookups import RowOwner

__all__ = ["Owner", "Rewriting"]


class Owner(GradientOwner, RowOwner, AssembledOwner, Protocol):
    """Who owns the bytes: the session, or a recorder that only writes down what is asked for."""

    def use(self, refs: Sequence[PlaneRef], names: Sequence[str], *, in_graph: bool) -> None:
        """Makes the units resident, all at once, for a use of these parameters. BudgetError where they cannot be.

        `in_graph`: autograd records the use as one of the parameters themselves.
        """

    def unpack(self, ref: PlaneRef, name: str) -> None:
        """Makes a unit resident for a backward that needs what a use has saved."""

    def wrap(self, key: Key) -> Tensor:
        """A 1-D tensor over a fresh storage of the slot that holds this resident unit, or a new copy of this parameter, whose unit is,
        or what is kept of one, put together. BudgetError where that does not fit.
        """

    def renew(self, key: str | AssembledKey, copy: Tensor) -> None:
        """Writes a parameter's value, or what is kept of it, which has changed, into a copy that is still held."""

    def thawed(self, name: str) -> None:
        """A parameter that was frozen is to be trained. BudgetError where there is no room for that; it stays frozen then."""

    def changed(self, key: WeightKey) -> None:
        """A weight unit's bytes, or a copy's, have been written in place."""

    def escaped(self, key: WeightKey) -> None:
        """Memory of a weight unit, or of a copy, has been handed out to code that can write to it unseen."""


class Rewriting(Protocol):
    """Who carries changes by hand elsewhere too."""

    def before(self, parameters: Iterable[BoundParameter]) -> list[Any]:
        """These parameters, which are resident, may be written now. What it gives is for `after`."""

    def after(self, before: list[Any]) -> None:
        """They have been."""
