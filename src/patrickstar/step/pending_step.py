"""An optimizer step that was called and is not yet carried out, as data.

Note [Pending step]
    `optimizer.step()` notes what is to be done as things stand then: hyper-parameters, counts and factors. The update of each chunk is done before
    anything else uses what it changes, or changes what it reads: mostly between the moments of the next forward (`plan/weave.py`), in the order in
    which that needs them; in a stretch of their own where somebody wants to see the model before, or where that forward has no plan. Each is done
    once and whole: what has begun ends on its lane, whatever happens to the caller, and what has not begun is still here.

    With `step="in_backward"` a step begins with the first gradient of a backward. It takes gradients chunk by chunk (`plan/whole_chunks.py`); the
    update of a chunk is pending once its last gradient has come. Where one does not come, or the backward leaves its trace, the step is closed: what
    has come by then is updated, parameter by parameter where a chunk has not all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from torch import Tensor

from patrickstar.core.layout import Layout, Part, Piece
from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Moment, Touch, Trace
from patrickstar.memory.lanes import Task
from patrickstar.optim.hyper import Hyper
from patrickstar.plan.weave import needs_before

Alike = tuple[int, Hyper, tuple[Tensor, ...]]
"""The number of an update, from 1, its hyper-parameters, and what the gradient is multiplied with first, in order (0-dim fp32)."""


class Doer(Protocol):
    """Does pending steps: `OptimizerStep`."""

    def work(self, order: PendingStep, chunk: int, tier: Tier) -> Task:
        """The work of a chunk's update on a tier, which begins now."""

    def carry_out(self, order: PendingStep) -> None:
        """Carries out what is left of a step, in a stretch of its own."""

    def over(self, order: PendingStep) -> None:
        """Is told that a step is carried out, or has failed."""


@dataclass(slots=True)
class PendingStep:
    """A step that `optimizer.step()` asked for, as things stood then. See Note [Pending step].

    Attributes:
        doer: does its updates.
        alike: of each parameter that is updated, by name. trace: a moment for each chunk that is updated.
        frees: gradients in chunks that nobody wants once they have been used.
        arrivals: by chunk that takes gradients, how many moments are still to bring a part of them.
        waiting: by chunk, the moments of the updates that have not begun. under_way: chunks whose update has begun and not ended.
        failed: what an update has raised half way. seconds: how long updates have taken. is_woven: whether it is done between others' moments.
    """

    doer: Doer
    alike: dict[str, Alike]
    trace: Trace
    frees: set[PlaneRef] = field(default_factory=set)
    arrivals: dict[int, int] = field(default_factory=dict)

    waiting: dict[int, Moment] = field(init=False)
    under_way: set[int] = field(default_factory=set)
    failed: BaseException | None = None
    seconds: float = 0.0
    is_woven: bool = False
    _moments: dict[int, Moment] = field(init=False, repr=False)
    _came: dict[int, set[int]] = field(init=False, repr=False)
    _of_unit: dict[PlaneRef, list[int]] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self._moments = {moment.updates: moment for moment in self.trace.moments if moment.updates is not None}
        self._came = {chunk: set() for chunk in self.arrivals}
        self.waiting = {chunk: moment for chunk, moment in self._moments.items() if chunk not in self.arrivals}
        for chunk, moment in self._moments.items():
            for touch in moment.touches:
                self._of_unit.setdefault(touch.ref, []).append(chunk)

    def takes(self, part: Part) -> bool:
        """Tells whether a gradient of these elements goes into its chunk, to be used with the others of that."""
        return part.chunk in self.arrivals

    def take(self, part: Part) -> Moment | None:
        """Notes that the gradient of these elements is in its chunk. Gives the update that is pending since: none as long as others are to come."""
        chunk = part.chunk
        self._came[chunk].add(part.start)
        if chunk in self.arrivals:
            self.arrivals[chunk] -= 1
            if self.arrivals[chunk]:
                return None
            del self.arrivals[chunk]
        self.waiting[chunk] = self._moments[chunk]
        return self.waiting[chunk]

    def close(self) -> None:
        """Takes no more gradients: what has come is pending."""
        self.waiting.update((chunk, self._moments[chunk]) for chunk in self.arrivals if self._came[chunk])
        self.arrivals.clear()

    def pieces(self, layout: Layout, chunk: int) -> list[Piece]:
        """The pieces of a chunk that its update is about."""
        came = self._came.get(chunk)
        pieces = [piece for piece in layout.tensors_in(chunk) if piece.name in self.alike]
        return pieces if came is None else [piece for piece in pieces if piece.start in came]

    def due(self, touches: Iterable[Touch]) -> list[Moment]:
        """The updates that must be done before somebody touches these units."""
        found = (self._of_unit.get(touch.ref, ()) for touch in touches if needs_before(touch))
        return [self.waiting[chunk] for chunk in dict.fromkeys(chain(*found)) if chunk in self.waiting]

    def reads(self, gradient: PlaneRef) -> bool:
        """Tells whether an update that has not begun will read this gradient."""
        return any(chunk in self.waiting for chunk in self._of_unit.get(gradient, ()))

    def leaves(self) -> tuple[set[PlaneRef], set[PlaneRef]]:
        """The units that will have contents once the updates that have not begun are over, and those that will have none."""
        units = {touch.ref for moment in tuple(self.waiting.values()) for touch in moment.touches}
        return units - self.frees, units & self.frees

    def begin(self, chunk: int) -> bool:
        """Notes that the update of a chunk begins now. False: it has begun before, and must not again."""
        with self._lock:
            if self.waiting.pop(chunk, None) is None:
                return False
            self._came.get(chunk, set()).clear()
            self.under_way.add(chunk)
            return True

    def end(self, chunk: int, seconds: float) -> None:
        """Notes that the update of a chunk is over."""
        with self._lock:
            self.under_way.discard(chunk)
            self.seconds += seconds

    @property
    def is_done(self) -> bool:
        """True once every update is over, and no gradient is to come."""
        return not self.arrivals and not self.waiting and not self.under_way
