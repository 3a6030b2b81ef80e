"""The only file that registers module hooks. They forward events, and decide nothing.

A model that is copied while it is managed (averages, twins for tracing) takes its hooks along: a copied hook does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["ModuleEvents", "Watched", "watch_calls", "watch_parameters", "watch_root"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ModuleEvents(Protocol):
    """A listener to the calls of a watched module."""

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """A forward begins; may give other arguments."""

    def after_forward(self, module: nn.Module) -> None:
        """A forward has ended, or was left by an exception."""


class Watched:
    """Hooks that can be removed."""

    def __init__(self, handles: Iterable[RemovableHandle]) -> None:
        self._handles = list(handles)

    def remove(self) -> None:
        """Takes the hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Hook:
    """A hook that does nothing on a copy of its module."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def watch_root(model: nn.Module, events: ModuleEvents) -> Watched:
    """Tells of the forwards of a model. Ours comes before the user's hooks on the way in, and after them on the way out."""
    return Watched(
        (
            model.register_forward_pre_hook(_Hook(events.before_forward), with_kwargs=True, prepend=True),
            model.register_forward_hook(_Hook(lambda module, *_: events.after_forward(module)), always_call=True),
        )
    )


def watch_calls(modules: Iterable[nn.Module], events: ModuleEvents) -> Watched:
    """Tells of the calls of some modules inside a model."""
    handles: list[RemovableHandle] = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(_Hook(events.before_forward), with_kwargs=True))
        handles.append(
            module.register_forward_hook(
                _Hook(lambda module, *_: events.after_forward(module)), always_call=True, prepend=True
            )
        )
    return Watched(handles)


def watch_parameters(registered: Callable[[nn.Module, str, nn.Parameter], None]) -> Watched:
    """Tells of every parameter that any module registers, by module and name, just before."""
    return Watched((register_module_parameter_registration_hook(registered),))
