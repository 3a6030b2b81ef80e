"""The backward calls that are under way, one inside of another where blocks are computed again, and when they end."""

from __future__ import annotations

from collections.abc import Callable

from patrickstar.torch_private import at_end_of_backward, backward_id, inside_backward_node

__all__ = ["Backwards"]


class Backwards:
    """Notices ends. torch tells of the end of the innermost backward call alone, and only whoever asks inside of it.

    Args:
        ended: called when a backward ends that has brought gradients, itself or in one inside of it. Its argument: whether it is inside of
            another, which goes on.

    Attributes:
        nested: whether one inside of another has ended, and the other has not.
    """

    def __init__(self, ended: Callable[[bool], None]) -> None:
        self._ended = ended

        self._bringing: int | None = None
        self._around: int | None = None
        self.nested = False

    @property
    def bring(self) -> bool:
        """Whether one is under way that has brought gradients."""
        return self._bringing is not None

    def notice_gradient(self) -> None:
        """The innermost one has a gradient to give, now or at its end."""
        if self._bringing != backward_id():
            self._bringing = backward_id()
            at_end_of_backward(self._end)

    def notice_recomputation(self) -> None:
        """A block is computed again: all gradients may come from a backward inside of this one, whose end is the end of all the same."""
        if self._around != backward_id():
            self._around = backward_id()
            at_end_of_backward(self._end_around)

    def _end_around(self) -> None:
        if self.nested and not inside_backward_node():
            self._end()

    def _end(self) -> None:
        self.nested = inside_backward_node()
        try:
            self._ended(self.nested)  # which may bring gradients that have waited for this
        finally:
            self._bringing = None

    def forget(self) -> None:
        """None is under way: an exception may have left one."""
        self._bringing, self.nested = None, False
