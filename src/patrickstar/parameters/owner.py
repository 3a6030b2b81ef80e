"""The owner of the bytes of parameters, whom the binding asks and tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from patrickstar.core.trace import Touch
from patrickstar.memory.leases import AssembledKey, CopyKey, WeightKey
from patrickstar.parameters.bound import BoundParameter


class Owner(Protocol):
    """The owner of the bytes: `Events` for a session, or the twin of a trial run, which only writes down what is asked for.

    What one who inherits from this leaves out does nothing.

    Attributes:
        session_name: how messages call the session.
    """

    session_name: str = "a session"

    def use(self, label: str, touches: Sequence[Touch]) -> None:
        """Makes the units of a use resident, all at once; `label` is the first parameter's name. BudgetError where they cannot be."""

    def carry_out_pending(self) -> None:
        """Does what was asked for and is still to be done: a view, held all the time, is about to be used."""

    def unpack(self, label: str, touches: Sequence[Touch]) -> None:
        """Makes units resident for a backward that needs what uses have saved, all at once."""

    def renew(self, key: str | AssembledKey, copy: Tensor) -> None:
        """Writes a parameter's changed value, or what has changed of what is kept of it, into a copy that is still held."""

    def updated(self) -> None:
        """Notes that the library has written parameters: an update, a value that was loaded."""

    def thawed(self, name: str) -> None:
        """Makes room for training a parameter that was frozen. BudgetError where there is none; the parameter stays frozen then."""

    def changed(self, key: WeightKey) -> None:
        """Notes that a weight unit's or copy's bytes, still held, were written in place. See Note [Changes in place] in `changes.py`."""

    def escaped(self, key: WeightKey) -> None:
        """Notes that memory of a weight unit, or of a copy, has been handed out to code that can write to it unseen."""

    def gradient(self, name: str, gradient: Tensor | None) -> None:
        """Takes a gradient that has arrived in backward; None: it was added to one of the user's own, which stays where it is."""

    def has_gradient(self, name: str) -> bool:
        """Tells whether a parameter has a gradient."""

    def is_spent(self, name: str) -> bool:
        """Tells whether the gradient of a parameter has been used as it came, and nobody has zeroed it since."""

    def drop_gradient(self, name: str) -> None:
        """Drops the gradient accumulated so far, which is no longer wanted."""

    def make_copy(self, key: CopyKey) -> Tensor:
        """A 1-D tensor with a parameter's value, whose units are resident, or what is kept of one, put together.

        Raises:
            BudgetError: the tensor does not fit.
        """

    def settle(self) -> None:
        """Does what is pending: state is about to be read or written."""

    def expect_room(self, key: AssembledKey) -> None:
        """Raises BudgetError where there is no room to put this tensor together, alone."""

    def assembled_changed(self, key: AssembledKey, *, wholly: bool) -> None:
        """Takes a change, in place, of a tensor that was put together. `wholly`: every element was written, with other bits or not."""


class Rewriting(Protocol):
    """The one who keeps more of parameters than they show, and so must know which of their elements have been changed."""

    def keeps_more(self, bound: BoundParameter) -> bool:
        """Tells whether more is kept of a parameter than it shows."""

    def carry(self, bound: BoundParameter, before: Tensor | None) -> None:
        """Carries a change in place of a resident parameter to where more is kept of it.

        `before`: what its elements were, 1-D in slot order; None: nobody knows, and all of them count as changed.
        """
