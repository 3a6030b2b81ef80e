"""Whom the binding asks and tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Touch
from patrickstar.memory.leases import AssembledKey, WeightKey
from patrickstar.parameters.assembled import AssembledOwner
from patrickstar.parameters.bound import BoundParameter
from patrickstar.parameters.gradient_access import GradientOwner
from patrickstar.parameters.lookups import RowOwner

__all__ = ["Owner", "Rewriting"]


class Owner(GradientOwner, RowOwner, AssembledOwner, Protocol):
    """Who owns the bytes: the session, or a recorder that only writes down what is asked for."""

    def use(self, touches: Sequence[Touch], names: Sequence[str], *, in_graph: bool) -> None:
        """Makes the units resident, all at once, for a use of these parameters. BudgetError where they cannot be.

        `in_graph`: autograd records the use as one of the parameters themselves.
        """

    def carry_out_pending(self) -> None:
        """Does what was asked for and is still to be done: a view, which is held all the time, is about to be used."""

    def unpack(self, ref: PlaneRef, name: str) -> None:
        """Makes a unit resident for a backward that needs what a use has saved."""

    def renew(self, key: str | AssembledKey, copy: Tensor) -> None:
        """Writes a parameter's value, or what is kept of it, which has changed, into a copy that is still held."""

    def updated(self) -> None:
        """Parameters have been written by the library: an update, a value that was loaded."""

    def thawed(self, name: str) -> None:
        """A parameter that was frozen is to be trained. BudgetError where there is no room for that; it stays frozen then."""

    def changed(self, key: WeightKey) -> None:
        """A weight unit's bytes, or a copy's, have been written in place, and are still held. See Note [Changes in place] in `changes.py`."""

    def escaped(self, key: WeightKey) -> None:
        """Memory of a weight unit, or of a copy, has been handed out to code that can write to it unseen."""


class Rewriting(Protocol):
    """Who keeps more of parameters than they show, and so must know which of their elements have been changed."""

    def keeps_more(self, bound: BoundParameter) -> bool:
        """Whether it does, of this one."""

    def carry(self, bound: BoundParameter, before: Tensor | None) -> None:
        """Elements of a parameter, which is resident, have been changed in place.

        `before`: what they were, 1-D in slot order; None: nobody knows, and all of them count as changed.
        """
