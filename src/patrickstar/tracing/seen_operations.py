"""Shows each operation that runs, with its result, without a dispatch mode.

Note [No mode in a step]
    While any dispatch mode is on, torch takes every tensor for one without a storage (`at::isTensorSubclassLike`), and several of its formulas
    compute something else then: the gradient of `prod`, for one, is off by an ulp. So a measured step has no mode. All operations have a kernel
    of ours at a dispatch key that nothing else uses, below autograd and modes; torch goes there while the key is included on a thread, and a
    thread that runs a backward for another has that one's keys and objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from patrickstar.torch_private import Plain

__all__ = ["nobody_sees", "show_to", "shown_to"]

_KEY = "Fake"  # of torchdistx, which is no more: torch has no kernel there
_SEERS = "patrickstar.seers"
_ours = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))


def shown_to() -> tuple[Any, ...]:
    """Gives those who see this thread's operations now."""
    return torch._C._get_obj_in_tls(_SEERS) if torch._C._is_key_in_tls(_SEERS) else ()


def show_to(seers: tuple[Callable[[Any, Any], None], ...]) -> None:
    """Has these called with each operation of this thread, and of backwards that begin there, and with its result.

    What is set inside of a backward holds to its end.
    """
    _install()
    torch._C._stash_obj_in_tls(_SEERS, seers)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, bool(seers))


@contextmanager
def nobody_sees() -> Iterator[None]:
    """A context in which operations are shown to nobody."""
    with torch._C._ExcludeDispatchKeyGuard(_ours):
        yield


@cache
def _install() -> tuple[torch.library.Library, ...]:
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(_show, _KEY)
    for alias in (
        "detach",
        "alias",
        "lift_fresh",
    ):  # of a result with a Python object, a plain tensor's, no subclass can be made
        aten.impl(alias, torch.library.fallthrough_kernel, _KEY)
    return everything, aten


def _show(func: Any, *args: Any, **kwargs: Any) -> Any:
    # Down here operations are torch's own (an accumulator asks a fake parameter for its metadata, with that parameter's lock held): what
    # they touch is no use of a parameter. What is called by an operation or by who sees it is not shown.
    with torch._C._ExcludeDispatchKeyGuard(_ours):
        with Plain():
            result = func(*args, **kwargs)
        for seer in shown_to():
            seer(func, result)
    return result
