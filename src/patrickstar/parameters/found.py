"""What of a session is among the arguments of a torch function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from patrickstar.parameters.assembled import AssembledRecord
from patrickstar.parameters.bound import BoundParameter

if TYPE_CHECKING:
    from patrickstar.parameters.binding import Binding

__all__ = ["Found"]


class Found:
    """The managed tensors among values, in nested lists, tuples and dicts.

    Attributes:
        parameters: the records of parameters and their detached aliases, each once. aliases: views of slots, and of what is held in their stead.
        assembled: the records of gradients and state that lie in chunks, each once.
        others: the bindings of other sessions that have a part in the values too.
    """

    __slots__ = ("_alias_class", "_binding", "_bound", "aliases", "assembled", "others", "parameters")

    def __init__(
        self,
        binding: Binding,
        value: Any,
        *,
        bound: Callable[[object], BoundParameter | None],
        alias_class: type[Tensor],
    ) -> None:
        self._binding = binding
        self._bound = bound
        self._alias_class = alias_class

        self.parameters: list[BoundParameter] = []
        self.aliases: list[Tensor] = []
        self.assembled: list[AssembledRecord] = []
        self.others: list[Binding] = []
        self._search(value)

    def _search(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._add(value)
        elif isinstance(value, list | tuple):
            for item in value:
                self._search(item)
        elif isinstance(value, dict):
            for item in value.values():
                self._search(item)

    def _add(self, tensor: Tensor) -> None:
        bound = self._bound(tensor)
        if bound is not None:
            if bound not in self.parameters:
                self.parameters.append(bound)
        elif type(tensor) is self._alias_class:
            self.aliases.append(tensor)
        elif type(tensor) is not Tensor:
            assembled = self._binding.assembled.of(tensor)
            if assembled is not None and assembled not in self.assembled:
                self.assembled.append(assembled)
            other = getattr(type(tensor), "managed_by", self._binding)
            if other is not self._binding and other not in self.others:
                self.others.append(other)
