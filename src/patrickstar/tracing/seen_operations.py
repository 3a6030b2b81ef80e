"""Shows each operation that runs, with its result, without a dispatch mode.

Note [No mode in a step]
    While any dispatch mode is on, torch takes every tensor for one without a storage (`at::isTensorSubclassLike`), and several of its formulas
    compute something else then: the gradient of `prod`, for one, is off by an ulp. So a measured step has no mode. All operations have a kernel
    of ours at a dispatch key that nothing else uses, below autograd; torch goes there while the key is included on a thread, and a
    thread that runs a backward for another has that one's keys and objects.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from patrickstar.torch_private import OBSERVERS_KEY as _KEY
from patrickstar.torch_private import Plain, is_being_compiled, unobserved

# Not shown: of a result with a Python object, which is a plain tensor's, no subclass can be made.
_ALIASES = ("detach", "alias", "lift_fresh")
_SEERS = "patrickstar.seers"


def shown_to() -> tuple[Any, ...]:
    """Gives those who see this thread's operations now."""
    return torch._C._get_obj_in_tls(_SEERS) if torch._C._is_key_in_tls(_SEERS) else ()


def show_to(seers: tuple[Callable[[Any, Any], None], ...]) -> None:
    """Has these called with each operation of this thread, and of backwards that begin there, and with its result.

    What is set inside of a backward holds to its end.
    """
    _install()
    held = sys.getrefcount(seers)
    torch._C._stash_obj_in_tls(_SEERS, seers)
    if sys.getrefcount(seers) == held:  # torch 2.11 takes the caller's reference in the place of one of its own
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(seers))
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, bool(seers))


@cache
def _install() -> list[torch.library.Library]:
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_show, _KEY)
    libraries = {"_": everything, "aten": torch.library.Library("aten", "IMPL")}
    for alias in _ALIASES:
        libraries["aten"].impl(alias, torch.library.fallthrough_kernel, _KEY)
    # By name too: until torch 2.12 no kernel of all operations is found, and none is called for fake tensors, with which torch.compile works.
    for name in torch._C._dispatch_get_all_op_names():
        space, _, short = name.partition("::")
        if short.partition(".")[0] not in _ALIASES:
            if space not in libraries:
                libraries[space] = torch.library.Library(space, "IMPL")
            libraries[space].impl(short, partial(_show_named, name), _KEY)
    return list(libraries.values())


@cache
def _operation(name: str) -> Any:
    space, _, short = name.partition("::")
    packet, _, overload = short.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def _show_named(name: str, *args: Any, **kwargs: Any) -> Any:
    return _show(_operation(name), *args, **kwargs)


def _show(func: Any, *args: Any, **kwargs: Any) -> Any:
    # Down here operations are torch's own (an accumulator asks a fake parameter for its metadata, with that parameter's lock held): what
    # they touch is no use of a parameter. What is called by an operation or by who sees it is not shown.
    with unobserved():
        with Plain():
            result = func(*args, **kwargs)
        # The key stays as it is while torch.compile works, which guards on it; what it tries out is no part of a step.
        for seer in () if is_being_compiled() else shown_to():
            seer(func, result)
    return result
