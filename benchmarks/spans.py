"""What runs while torch is inside of us: function calls by span, as `sys.setprofile` tells them.

A span begins where torch or its user enters the package, and ends where that call ends. Nothing here knows a name of the package but its own:
what a span is, is told by what torch passes and gets back. The first of these that fits:

| kind | the call of |
|---|---|
| use | a function of torch's that the caller names |
| operation | a function of ours that is given an operator, or the name of one, as kernels that see every operation are |
| unpack | a function of ours that returns a tensor, as hooks of saved tensors do |
| gradient | a function of ours that is given a parameter, as hooks of gradients are |
| other | any other function of ours |

Counts are exact for given code, Python and torch: they depend on no clock. Only the thread that counts is seen; on the CPU a backward runs on the
thread that asked for it. While it looks on, Python keeps arguments alive until their function returns, whatever the function does with them.
"""

from __future__ import annotations

import ctypes
import enum
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = ["Kind", "Span", "Spans", "has_state"]

Kind = Literal["use", "operation", "unpack", "gradient", "other"]
_OPERATOR = type(torch.ops.aten.mm.default)


@dataclass(slots=True)
class Span:
    """One stay of torch's inside of the package.

    `python` and `c`: calls of functions written in Python and in C, the first one included; to go on with a generator is a call. `classes` have
    state, and a method of theirs ran; of `files` a function ran. `shape`: of the tensor that was returned.
    """

    kind: Kind
    python: int = 0
    c: int = 0
    classes: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    shape: tuple[int, ...] | None = None


class Spans:
    """The spans of what runs inside of `counting`, in the order of time.

    Args:
        use: the function of torch's whose calls are uses. package: whose functions and classes are ours.
    """

    def __init__(self, use: Callable[..., Any], *, package: str = "patrickstar") -> None:
        self._use = use
        self._package = package

        self.found: list[Span] = []
        self._open: Span | None = None
        self._frame: FrameType | None = None
        self._ends: tuple[str, ...] = ()  # the events of that frame that end the open span

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Finds the spans in here. No garbage is collected meanwhile: what that calls would be counted for whoever made the last object."""
        collects, before = gc.isenabled(), sys.getprofile()
        gc.collect()
        gc.disable()
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(before)
            self._open = self._frame = None
            if collects:
                gc.enable()

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        span = self._open or self._begun(frame, event, argument)
        if span is None:
            return
        if event == "call":
            span.python += 1
            self._enter(span, frame)
        elif event == "c_call":
            span.c += 1
        elif frame is self._frame and event in self._ends:
            # Of what is returned nothing is kept: a view of a slot would keep the slot where it is.
            if event == "return" and type(argument) is Tensor:
                span.shape = tuple(argument.shape)
                span.kind = "unpack" if span.kind in ("gradient", "other") else span.kind
            self.found.append(span)
            self._open = self._frame = None

    def _begun(self, frame: FrameType, event: str, argument: Any) -> Span | None:
        """The span that begins with this event, if one does."""
        if event == "c_call" and argument is self._use:
            self._open, self._ends = Span("use"), ("c_return", "c_exception")
        elif event == "call" and self._module(frame) is not None:
            self._open, self._ends = Span(_kind(frame)), ("return",)
        else:
            return None
        self._frame = frame
        return self._open

    def _enter(self, span: Span, frame: FrameType) -> None:
        module = self._module(frame)
        if module is None:
            return
        span.files.add(module.removeprefix(f"{self._package}.").replace(".", "/") + ".py")
        code = frame.f_code
        cls = type(frame.f_locals.get(code.co_varnames[0])) if code.co_argcount else object
        if self._is_ours(cls.__module__) and has_state(cls):
            span.classes.add(f"{cls.__module__}.{cls.__qualname__}".removeprefix(f"{self._package}."))

    def _module(self, frame: FrameType) -> str | None:
        """The module of ours whose function this is; None: it is not ours."""
        name = frame.f_globals.get("__name__")
        return name if isinstance(name, str) and self._is_ours(name) else None

    def _is_ours(self, module: str) -> bool:
        return module == self._package or module.startswith(f"{self._package}.")


def has_state(cls: type) -> bool:
    """Whether instances may change: not those of frozen dataclasses, tuples and enumerations. Tensors, memory, errors and classes do not count."""
    frozen = is_dataclass(cls) and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return not frozen and not issubclass(cls, tuple | enum.Enum | Tensor | ctypes.Array | BaseException | type)


def _kind(frame: FrameType) -> Kind:
    """The kind of span that this call begins, as far as its arguments tell."""
    given: list[object] = []
    for value in frame.f_locals.values():
        given += value if type(value) is tuple else [value]
    if any(isinstance(value, _OPERATOR) or (isinstance(value, str) and "::" in value) for value in given):
        return "operation"
    # Asked of the class: nn.Parameter asks instances for an attribute.
    return "gradient" if any(issubclass(type(value), nn.Parameter) for value in given) else "other"
