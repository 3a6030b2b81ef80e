"""Stand-ins for the same bytes as a parameter that are not the parameter: `weight.detach()`, `weight.data`. See Note [Binding]."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

from torch import Tensor

from patrickstar.parameters.bound import BoundParameter

__all__ = ["DetachedAliases"]


class DetachedAliases:
    """The living ones of a session.

    Args:
        detached_class: the class they have.
    """

    def __init__(self, detached_class: type[Tensor]) -> None:
        self._class = detached_class
        self._known: dict[int, tuple[weakref.ref[Tensor], BoundParameter]] = {}

    def of(self, tensor: object) -> BoundParameter | None:
        """The record of such an alias; else None."""
        return self._known[id(tensor)][1] if type(tensor) is self._class else None

    def is_one(self, tensor: object) -> bool:
        """Whether the tensor is such an alias."""
        return type(tensor) is self._class

    def make(self, bound: BoundParameter, alias: Tensor) -> Tensor:
        """Turns what torch gave for the stand-in, with the version counter it has, into a stand-in of its own."""
        if bound.depth:
            alias.data = bound.standin
        key, known = id(alias), self._known
        reference = weakref.ref(alias, lambda _: known.pop(key, None))
        alias.__class__ = self._class
        living = cast("Callable[[], Tensor]", reference)  # asked for only through the alias itself, so alive
        known[key] = reference, replace(bound, tensor=living, lease=None, depth=0, handles=[], tiles=())
        return alias

    def release(self, by_name: Mapping[str, BoundParameter]) -> None:
        """They become ordinary tensors over what their parameters are now."""
        for reference, bound in list(self._known.values()):
            tensor = reference()
            if tensor is not None:
                tensor.__class__ = Tensor
                tensor.data = by_name[bound.name].parameter.data
        self._known.clear()
