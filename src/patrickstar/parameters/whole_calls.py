"""Modules whose calls are taken as one use.

torch's fused encoder and attention paths refuse parameters of any subclass and compute other bits without them. They run only where
nothing is recorded for backward; for such calls the module's parameters are fetched and of the ordinary class for the call's duration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from patrickstar.hooks import Watched, watch_calls
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import BoundParameter
from patrickstar.parameters.changes import WatchedUse
from patrickstar.torch_private import Plain

__all__ = ["WholeCalls"]

FUSED = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


class WholeCalls:
    """Watches the modules of a model that have a fused path."""

    def __init__(self, model: nn.Module, binding: Binding) -> None:
        self._binding = binding
        self._open: dict[int, list[ExitStack]] = {}
        self._model = model
        self.watched = Watched(())

    def watch(self) -> None:
        """Watches from now on: parameters are bound by use."""
        kinds = (*FUSED, nn.TransformerEncoder)
        self.watched = watch_calls([module for module in self._model.modules() if isinstance(module, kinds)], self)

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        """The call begins: parameters are there, and ordinary."""
        stack = ExitStack()
        self._open.setdefault(id(module), []).append(stack)
        # A container asks for the class of its first layer's parameters, and leaves their bytes to the layer.
        container = isinstance(module, nn.TransformerEncoder)
        owner = next(iter(module.get_submodule("layers").children()), None) if container else module
        if owner is None:
            return
        found = [bound for bound in map(self._binding.bound, owner.parameters()) if bound is not None]
        if module.training or (torch.is_grad_enabled() and any(bound.parameter.requires_grad for bound in found)):
            return
        if not container:
            with Plain():
                self._binding.access.enter(found)
            parameters = [bound.parameter for bound in found]
            stack.callback(self._end, found, self._binding.changes.watch_call(type(module).__name__, parameters))
        stack.enter_context(_plain_class(found, self._binding))

    def _end(self, found: list[BoundParameter], watched: WatchedUse) -> None:
        with Plain():
            try:
                self._binding.changes.tell(watched)
            finally:
                self._binding.access.leave(found)

    def after_forward(self, module: nn.Module) -> None:
        """The call is over."""
        self._open[id(module)].pop().close()


@contextmanager
def _plain_class(found: Sequence[BoundParameter], binding: Binding) -> Iterator[None]:
    """Parameters of the ordinary class for a while, for code that refuses subclasses."""
    # Not those that an enclosing call has made ordinary already.
    managed = [bound.parameter for bound in found if binding.is_managed(bound.parameter)]
    classes = [type(parameter) for parameter in managed]
    for parameter in managed:
        parameter.__class__ = nn.Parameter
    try:
        yield
    finally:
        for parameter, kind in zip(managed, classes, strict=True):
            parameter.__class__ = kind
