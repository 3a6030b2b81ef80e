"""Side effects that a trial run does not have: nothing of it shows to what is the user's.

Note [Side effects]
    Hooks are the user's, and are not called: neither those of modules (of one, or of all) nor those that a forward gives to tensors. But torch's
    old `weight_norm`, `spectral_norm` and `prune` compute weights in hooks, and some libraries' models do other things in theirs: these are part
    of the forward, as those are that it gives to modules itself. Where another hook changes what runs, the step departs from its trace.
    Modes are off, but for torch's default device, which decides where a forward's tensors are; a profiler sees nothing; draws are drawn again by
    the step itself, and what is warned of is warned of by the step.
    A twin and its binding hold each other, and would wait for a collection of all that Python has, which is rare: several MiB of each new kind of
    forward, which no plan knows. They are collected as soon as nobody has them (`garbage_waits`).
    Functions that modules keep as attributes (a patched `forward`) are copied with the twin as far as they hold parts of the model, containers
    or other such functions. What else a forward reaches outside of the model is the real thing: a trial run changes it as a step does.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from patrickstar.torch_private import (
    call_without_hooks_of_all_modules,
    uncompiled,
    unobserved,
    unprofiled,
    without_modes,
)

_OF_TORCH = (WeightNorm, SpectralNorm, BasePruningMethod)
_LIBRARIES = frozenset(("peft", "transformers"))  # their models record outputs, and mark inputs, in hooks
_KEPT = (nn.Module, MethodType, FunctionType, list, dict, set)


@contextmanager
def no_side_effects(device: torch.device) -> Iterator[None]:
    """A context in which the user's modes are off, and of which neither a profile nor draws nor warnings show. See Note [Side effects]."""
    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(without_modes())
        stack.enter_context(unobserved())
        stack.enter_context(unprofiled())
        stack.enter_context(torch.jit.optimized_execution(False))  # it learns from what it runs
        stack.enter_context(torch.autograd.forward_ad._set_fwd_grad_enabled(False))
        stack.enter_context(_unwarned())
        stack.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        devices = [] if device.type == "cpu" else [device]
        stack.enter_context(torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"))
        # `parametrize.cached()` keeps weights of a copied module under the name of the one that it is a copy of.
        stack.callback(setattr, parametrize, "_cache", parametrize._cache)
        parametrize._cache = {}
        yield


def drop_hooks(modules: Iterable[Any]) -> None:
    """Drops the user's hooks of those of these objects that are modules, which are copies, and has their calls see no hooks of all modules."""
    for module in modules:
        if isinstance(module, nn.Module):
            vars(module)["_call_impl"] = MethodType(call_without_hooks_of_all_modules, module)
            for hooks in (
                module._forward_pre_hooks,
                module._forward_hooks,
                module._backward_hooks,
                module._backward_pre_hooks,
            ):
                for number in [number for number, hook in hooks.items() if not _computes(hook)]:
                    del hooks[number]


def _computes(hook: Any) -> bool:
    """Tells whether a hook is part of what a model computes, and not the user's."""
    return isinstance(hook, _OF_TORCH) or str(getattr(hook, "__module__", "")).partition(".")[0] in _LIBRARIES


class HooklessTensors(TorchFunctionMode):
    """A mode in which tensors take no hooks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook or func is Tensor.register_post_accumulate_grad_hook:
            return RemovableHandle(OrderedDict())
        return func(*args, **(kwargs or {}))


class CopiedFunctions:
    """Copies of the functions that a model's modules keep, over copies of what they hold.

    `memo`: of `copy.deepcopy`, which finds the copies there: before the model is copied they are empty, and `fill` comes after.
    """

    def __init__(self, model: nn.Module, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._copies: list[tuple[FunctionType, FunctionType]] = []
        for module in model.modules():
            for value in vars(module).values():
                self._copy(value)

    def _copy(self, value: Any) -> None:
        if not isinstance(value, FunctionType) or not value.__closure__ or id(value) in self._memo:
            return
        cells = tuple(CellType() for _ in value.__closure__)
        copied = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        copied.__kwdefaults__ = value.__kwdefaults__
        self._memo[id(value)] = copied
        self._copies.append((value, copied))
        for cell in value.__closure__:
            self._copy(cell.cell_contents)

    def fill(self) -> None:
        """Gives the copies what they hold: of the model and of containers copies, else the same objects."""
        for function, copied in self._copies:
            for cell, own in zip(function.__closure__ or (), copied.__closure__ or (), strict=True):
                held = cell.cell_contents
                # A module of somebody else's may be large.
                is_ours = isinstance(held, _KEPT) and not (isinstance(held, nn.Module) and id(held) not in self._memo)
                own.cell_contents = copy.deepcopy(held, self._memo) if is_ours else self._memo.get(id(held), held)


@contextmanager
def _unwarned() -> Iterator[None]:
    """A context in which nothing is warned of, after which what has been warned of is as before."""
    # What it cannot do is said once, by us, not with a traceback for each.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    # Not `catch_warnings`, after which Python forgets what it has shown.
    filters: Any = warnings.filters
    before, always = list(filters), torch.is_warn_always_enabled()
    filters.insert(0, ("ignore", None, Warning, None, 0))
    torch.set_warn_always(True)  # else what torch warns of once would count as said
    try:
        yield
    finally:
        torch.set_warn_always(always)
        filters[:] = before
        logger.disabled = disabled
