"""Gradients that the user reads as `p.grad`.

Where all of them would fit beside everything that is known of a step, a gradient that was read is the user's for good. Otherwise it is lent:
it goes back where it was before the next thing happens, and nobody may hold it by then. So is one that adds up in a wider type than its
parameter's: what is lent is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from patrickstar.core.trace import Trace
from patrickstar.errors import BudgetError, StateError
from patrickstar.nn.binding import Binding
from patrickstar.nn.bound import BoundParameter
from patrickstar.runtime.conductor import Conductor
from patrickstar.runtime.gradients import Gradients
from patrickstar.runtime.segments import Segments
from patrickstar.torch_private import Plain, gradient_is_held

__all__ = ["Lending"]


class Lending:
    """Hands gradients over, and takes back what was lent.

    Args:
        traces: of what a step does beside the forward and backward, at most.

    Attributes:
        lent: the parameters whose gradients must come back, by name.
    """

    def __init__(
        self,
        *,
        binding: Binding,
        conductor: Conductor,
        segments: Segments,
        gradients: Gradients,
        traces: Callable[[], Iterable[Trace]],
    ) -> None:
        self._binding = binding
        self._conductor = conductor
        self._segments = segments
        self._gradients = gradients
        self._traces = traces

        self.lent: set[str] = set()

    def hand_over(self, name: str) -> Tensor:
        """A gradient as a tensor of the user's own."""
        self._segments.pause()
        self.take_back()
        bound = self._binding.by_name[name]
        needed = bound.shape_only.numel() * bound.shape_only.element_size()
        rounded = self._gradients.dtype(bound) != bound.shape_only.dtype
        if rounded or not self._segments.has_room_for(needed, self._traces()):
            self.lent.add(name)
        try:
            with self._conductor.making(needed):
                gradient = self._gradients.read(bound, bound.shape_only.dtype)
        except BudgetError as refusal:
            raise StateError(
                f"{name}.grad does not fit: use session.gradients() or session.clip_grad_norm_(max_norm)"
            ) from refusal
        if not rounded:
            self._gradients.drop(name)
        return gradient

    def take_back(self) -> None:
        """What was lent goes back where it was.

        Raises:
            StateError: somebody still holds it. It stays where it is.
        """
        for name in sorted(self.lent):
            bound = self._binding.by_name[name]
            with Plain():
                if gradient_is_held(bound.parameter):
                    raise StateError(
                        f"{name}.grad: gradients read this way are lent, one at a time, where they do not fit all at once or add up in a wider type: "
                        "this one is still held. Use session.gradients() to read them one at a time, session.clip_grad_norm_(max_norm) "
                        "to clip, and session.optimizer.zero_grad() to let them go"
                    )
                own = self._binding.gradients.own_of(name)
                if own is not None:
                    self._put_back(bound, own)
                    bound.parameter.grad = None
                    self._binding.gradients.is_not_own(name)
            self.lent.discard(name)

    def _put_back(self, bound: BoundParameter, own: Tensor) -> None:
        if bound.name not in self._gradients.names:
            self._gradients.add(bound, own)
            return
        # What was lent was rounded; what it was rounded from is still there.
        if not torch.equal(own, self._gradients.read(bound, bound.shape_only.dtype)):
            raise StateError(
                f"{bound.name}.grad was changed. Gradients of several backwards add up in {self._gradients.dtype(bound)}, and `.grad` of a "
                f"{bound.shape_only.dtype} parameter shows them rounded: change them with session.clip_grad_norm_(max_norm), or scale the loss"
            )
