"""Updates of whole chunks while a backward goes on: gradients are gathered in their chunks, and the last one of a chunk begins its update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from patrickstar.core.layout import Part
from patrickstar.core.planes import GRAD, PlaneRef
from patrickstar.core.trace import Phase, Touch, Trace
from patrickstar.optim.hyper import Hyper
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import BoundParameter
from patrickstar.plan.stretch import Stretch
from patrickstar.step.executor import Executor
from patrickstar.step.pending_step import PendingStep

__all__ = ["Arrival", "WholeUpdates"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A gradient that has arrived, as far as it is of one chunk.

    Attributes:
        part: the elements of the chunk. gradient: theirs, in the type of the chunk's gradients.
        hyper, step: of the update.
    """

    bound: BoundParameter
    part: Part
    gradient: Tensor
    hyper: Hyper
    step: int


class WholeUpdates:
    """Gathers the gradients of chunks that the plan has updated whole. See Note [Pending step].

    Args:
        is_watched: tells whether somebody may write to weights unseen.
    """

    def __init__(self, executor: Executor, binding: Binding, *, is_watched: Callable[[], bool]) -> None:
        self._executor = executor
        self._binding = binding
        self._is_watched = is_watched

        self._stretch: Stretch | None = None
        self._hypers: dict[str, Hyper] = {}
        self._steps: dict[str, int] = {}
        self._order = PendingStep(self._hypers, self._steps, Trace(()))

    def begin(self) -> None:
        """Makes ready for the gradients of a backward, or of one inside of it."""
        stretch = self._executor.pilot.stretch
        if stretch is self._stretch:
            return
        self._stretch, whole = stretch, stretch.followed.whole_chunks if stretch.followed is not None else None
        self._hypers, self._steps = {}, {}
        if whole is None:
            self._order = PendingStep(self._hypers, self._steps, Trace(()))
            return
        updates = Trace(tuple(moment for moment in whole.trace.moments if moment.updates is not None))
        gradients, arrivals = set(whole.slots), dict(whole.arrivals)
        self._order = PendingStep(self._hypers, self._steps, updates, frees=gradients, arrivals=arrivals, is_woven=True)
        self._executor.pending = self._order

    def gather(self, arrival: Arrival) -> bool:
        """Puts a gradient into its chunk, and begins the chunk's update where it was the last one. False: the chunk is not updated whole."""
        bound, part, order = arrival.bound, arrival.part, self._order
        if not order.takes(part):
            return False
        if self._is_watched() or self._binding.changes.is_shown(bound.name):
            # Somebody would see values of before the update until that is over.
            self.end(f"{bound.name} is still in use in the backward")
            return False
        touches = (Touch(PlaneRef(part.chunk, GRAD), True),)
        (unit,) = self._executor.use(Phase.BACKWARD, bound.name, touches)
        unit[part.start : part.stop].copy_(arrival.gradient)
        self._hypers[bound.owner], self._steps[bound.owner] = arrival.hyper, arrival.step
        update = order.take(part)
        if update is not None:
            # Again, where the plan was left with this arrival: what had come before is updated.
            self._executor.pending = order
            self._executor.update(update)
        return True

    def keep(self, name: str, parts: Sequence[Part]) -> None:
        """Notes that a gradient is about to be kept until the backward ends, of which these are the parts."""
        if any(map(self._order.takes, parts)):
            self.end(f"the gradient of {name} has to wait until the backward ends")

    def forget(self) -> None:
        """Lets go of what has come and is not used: everything has been loaded anew."""
        self._order.arrivals.clear()
        for gradient in sorted(self._order.frees & self._executor.store.state.home.keys()):
            self._executor.release(gradient)

    def end(self, why: str = "") -> None:
        """Has what has come updated, and gathers no more in this backward. `why`: what the plan did not have."""
        if self._executor.pending is self._order:
            if why:
                self._executor.pilot.stretch.depart(why)
            self._order.close()
            self._executor.settle()
