"""The only file that registers module hooks. They forward events, and decide nothing. What watches takes its hooks off when it is closed.

A model that is copied while it is managed (averages, twins for tracing) takes its hooks along: a copied hook does nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType, MethodType
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from patrickstar.torch_private import is_compiling, uncompiled

_NAMES: Final = ("__module__", "__qualname__", "__doc__")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ModuleEvents(Protocol):
    """A listener to the calls of a watched module."""

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """A forward begins; may give other arguments."""

    def after_forward(self, module: nn.Module) -> None:
        """A forward has ended, or was left by an exception."""


class ModuleCalls(Protocol):
    """The one through whom calls of watched modules go."""

    def call(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        """The result of a call, which `run` gives."""


class _Hook:
    """A hook that does nothing on a copy of its module."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call_uncompiled(self.call, args, kwargs) if is_compiling() else self.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _call_uncompiled(call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with uncompiled():
        return call(*args, **kwargs)


def is_called_by_compiled() -> bool:
    """Tells whether a hook of ours has led here that code has called which runs compiled."""
    return any(frame.f_code is _call_uncompiled.__code__ for frame in frames())


def is_running_in(module: str) -> bool:
    """Tells whether a function of a module is one of those that have led here."""
    return any(frame.f_globals.get("__name__") == module for frame in frames())


def frames(now: FrameType | None = None) -> Iterator[FrameType]:
    """The frames that have led here, or to this one."""
    now = now or sys._getframe(1)
    while now is not None:
        yield now
        now = now.f_back


def _nothing(*_: Any, **__: Any) -> None:
    return None


def watch_root(model: nn.Module, events: ModuleEvents, *, in_copies: bool = False) -> ExitStack:
    """Tells of the forwards of a model. Ours comes before the user's hooks on the way in, and after them on the way out.

    `in_copies`: whether copies of the model tell the same listener.
    """
    before, after = events.before_forward, lambda module, *_: events.after_forward(module)
    if not in_copies:
        before, after = _Hook(before), _Hook(after)
    return _watched(
        model.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        model.register_forward_hook(after, always_call=True),
    )


def watch_calls(modules: Iterable[nn.Module], calls: ModuleCalls, method: str) -> ExitStack:
    """Has calls of some modules inside a model go through `calls`. They have no hooks for it: torch computes other bits of some modules with hooks.

    `method`: "forward", inside of the modules' hooks, or "_call_impl", around them.
    """
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    watched = ExitStack()
    for module in modules:
        kind = type(module)
        if method in vars(module):  # a twin's, whose call it is
            vars(module)[method] = partial(_told, weakref.ref(calls), module, vars(module)[method])
            continue
        if kind not in kinds:
            kinds[kind] = _telling(kind, weakref.ref(calls), method)  # weak, as a class is freed late
        # torch's compiled modules pass attributes on to what they wrap.
        object.__setattr__(module, "__class__", kinds[kind])
        watched.callback(object.__setattr__, module, "__class__", kind)
    return watched


def _told(
    calls: weakref.ref[ModuleCalls], module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    there = calls()
    return run(*args, **kwargs) if there is None else there.call(module, partial(run, *args, **kwargs))


def _telling(kind: type[nn.Module], calls: weakref.ref[ModuleCalls], method: str) -> type[nn.Module]:
    """A class that is like another, and equal to it (`type(module) == nn.Linear`), but for its calls. What is copied, or pickled, is of the other."""
    own = getattr(kind, method)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _without_hooks(self):
            return own(self, *args, **kwargs)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = forward if method == "forward" else own
        return _told(calls, self, partial(run, self), *args, **kwargs)

    def call_compiled(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = partial(kind.__call__, self)
        return run(*args, **kwargs) if self._compiled_call_impl is None else _told(calls, self, run, *args, **kwargs)

    def compile_own(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        self._compiled_call_impl = torch.compile(MethodType(kind._call_impl, self), *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = kind.__reduce_ex__(self, protocol)
        make, made_of, *state = reduced
        # Of what `copyreg.__newobj__` makes, pickling expects the class of what is pickled.
        make = kind.__new__ if make.__name__ == "__newobj__" else make
        return make, tuple(kind if part is type(self) else part for part in made_of), *state

    alike = {"__eq__": lambda one, other: other is one or other is kind, "__hash__": lambda _: hash(kind)}
    metaclass: Any = type(type(kind).__name__, (type(kind),), alike)
    members = {method: call, "__reduce_ex__": reduce, **{name: getattr(kind, name) for name in _NAMES}}
    if method == "_call_impl":
        members |= {"__call__": call_compiled, "compile": compile_own}
    telling: type[nn.Module] = metaclass(kind.__name__, (kind,), members)
    return telling


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """A context in which a module has no hooks of ours, unless the user's go before and after them."""
    both = (module._forward_pre_hooks, module._forward_hooks)
    ours = [dict(hooks) if all(isinstance(hook, _Hook) for hook in hooks.values()) else {} for hooks in both]
    for hooks, own in zip(both, ours, strict=True):
        for number in own:
            del hooks[number]
    try:
        yield
    finally:
        for hooks, own in zip(both, ours, strict=True):
            hooks.update(own)


def watch_parameters(registered: Callable[[nn.Module, str, nn.Parameter], None]) -> ExitStack:
    """Tells of every parameter that any module registers, by module and name, just before."""
    return _watched(register_module_parameter_registration_hook(registered))


def watch_arguments(
    model: nn.Module,
    before: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
    after: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None],
) -> ExitStack:
    """Shows each call of a model with its arguments, and then with its output. Both may raise, and change nothing."""
    return _watched(
        model.register_forward_pre_hook(_Hook(before), with_kwargs=True),
        model.register_forward_hook(_Hook(after), with_kwargs=True),
    )


def _watched(*handles: RemovableHandle) -> ExitStack:
    """Takes the hooks off when it is closed."""
    hooks = ExitStack()
    for handle in handles:
        hooks.callback(handle.remove)
    return hooks
