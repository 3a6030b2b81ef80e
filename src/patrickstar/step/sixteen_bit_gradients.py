"""Gradients of weights of 16 bits that keep their bytes: autograd's own as long as 16 bits hold them; else in chunks, and `p.grad` shows them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import Tensor

from patrickstar.errors import StateError
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import BoundParameter
from patrickstar.step.gradients import Gradients
from patrickstar.torch_private import Plain

_IN_PARTS = (
    "{} has two gradients in one backward, or in two without a forward or a step in between (re-entrant checkpointing): they would not be added up "
    "as 16 bits have them. Call checkpoint() with use_reentrant=False"
)


@dataclass(eq=False)
class SixteenBitGradients:
    """Puts gradients into chunks when they become more than 16 bits hold: before a second backward adds to them, and before they are multiplied.

    Attributes:
        in_chunks: the gradients there. came: those of this backward that stay as autograd makes them, by name, and their versions.
    """

    binding: Binding
    in_chunks: Gradients

    came: dict[str, int] = field(default_factory=dict)
    _made: dict[str, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)  # by those before, in order

    def comes(self, name: str) -> None:
        """Makes way for a gradient that autograd is about to add to `p.grad`. StateError: it is a second part of one."""
        bound, gradients = self.binding.by_name[name], self.binding.gradients
        gradients.hide([bound])
        if name in self.came:
            raise StateError(_IN_PARTS.format(name))
        own = self._made_by_autograd(name)
        if own is not None:
            self._put_in_chunk(bound, own)
        if gradients.own_of(name) is None:  # else autograd adds to one that was assigned
            self.came[name] = 0

    def arrived(self, bound: BoundParameter, gradient: Tensor) -> None:
        """Takes a gradient that is in `p.grad`: adds it to what is in chunks, or leaves it, rounded to the type that is kept."""
        if bound.name in self.in_chunks.names:
            bound.parameter.grad = None
            self.in_chunks.add(bound, gradient)
            self.binding.gradients.show([bound])
        elif bound.name in self.came:
            kept = self.in_chunks.dtype(bound)
            if kept.itemsize < gradient.dtype.itemsize:
                if (
                    gradient.untyped_storage().nbytes() > gradient.nbytes
                ):  # a part of others', whose changes count as its own
                    bound.parameter.grad = gradient = gradient.data
                with self.in_chunks.executor.quiet():
                    gradient.copy_(gradient.to(kept))
            self.came[bound.name] = gradient._version

    def backward_ended(self) -> None:
        """Notes that what has come is whole."""
        for name, version in self.came.items():
            own = self.binding.gradients.own_of(name)
            if own is not None:
                self._made[name] = weakref.ref(own), version
        self.came.clear()

    def take_back(self) -> None:
        """Takes over what has become of `p.grad` of gradients in chunks: zeroed, or another. StateError where it is of half a backward."""
        if not self.binding.gradients.shown.keys() >= {self.binding.by_name[name] for name in self.in_chunks.names}:
            raise StateError(
                "an exception ended a backward that added to gradients: some have what it brought, others have not. Call optimizer.zero_grad()"
            )
        self.binding.gradients.take_back()

    def put_in_chunks(self) -> None:
        """Puts what autograd has made into chunks: it is about to be more than it shows."""
        for name in list(self._made):
            own = self._made_by_autograd(name)
            if own is not None:
                with Plain():
                    self._put_in_chunk(self.binding.by_name[name], own)
                    self.binding.gradients.show([self.binding.by_name[name]])

    def make_fit(self, bound: BoundParameter, own: Tensor) -> None:
        """Has gradients be kept in the type of one that was assigned, or changed by hand: it is not rounded."""
        if self._made_by_autograd(bound.name) is not own or own._version != self._made[bound.name][1]:
            self.in_chunks.make_fit(bound, own.dtype)

    def _made_by_autograd(self, name: str) -> Tensor | None:
        """The gradient, where it is what autograd has made in a backward before."""
        own = self.binding.gradients.own_of(name)
        return own if own is not None and name in self._made and self._made[name][0]() is own else None

    def _put_in_chunk(self, bound: BoundParameter, own: Tensor) -> None:
        self.make_fit(bound, own)
        bound.parameter.grad = None
        del self._made[bound.name]
        self.in_chunks.add(bound, own)
        self.in_chunks.whole.add(bound.name)
