"""Transforms, tracers and compilers around a forward or a use: they would read placeholders, so they are refused before anything is computed.

So are wrappers of PyTorch that average gradients or share parameters over ranks: a session does both itself. A placeholder that is read all the
same, by code that no check here sees, has torch raise an error (`refuse_reads` in `torch_private.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from patrickstar.errors import StateError
from patrickstar.hooks import frames
from patrickstar.torch_private import is_compiling, overrides_are_on, transform_level

_COPY = "or do it with a copy, copy.deepcopy(model), which has ordinary parameters"


def is_compiled(module: nn.Module) -> bool:
    """Tells whether a module is to run compiled (`torch.compile(module)`, `module.compile()`)."""
    return bool(module._compiled_call_impl) or "_orig_mod" in module._modules


def expect_no_transform(what: str) -> None:
    """Raises StateError inside of a `torch.func` transform, `vmap` or forward-mode `jvp`."""
    if transform_level() is not None:
        raise StateError(
            f"{what} inside of a transform of torch.func (grad, vjp, jvp, jacrev, vmap): parameters that lie in chunks cannot be transformed. "
            f"Differentiate with backward() or torch.autograd.grad(), pass a batch in place of vmap, {_COPY}"
        )


def is_ordinary_call() -> bool:
    """Tells whether no compiler, tracer or transform is at work."""
    return not (is_compiling() or transform_level() is not None or torch.jit.is_tracing() or _tracers())


def _tracers() -> list[str]:
    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack() if getattr(mode, "_mode_key", None)]


def expect_ordinary_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], probe: nn.Parameter | None
) -> None:
    """Raises StateError where a forward is about to be compiled, traced or transformed, or its inputs would not let parameters be seen.

    `probe`: any managed parameter that no block owns; None: there is none.
    """
    name = type(model).__name__
    expect_no_transform(f"a forward of {name}")
    if torch.jit.is_tracing() or (tracers := _tracers()):
        by = "torch.jit.trace" if torch.jit.is_tracing() else tracers[0]
        raise StateError(
            f"a forward of {name} under {by}: parameters that lie in chunks cannot be traced. Trace before manage(), {_COPY}"
        )
    if not overrides_are_on():
        raise StateError(
            f"a forward of {name} while __torch_function__ is switched off (torch._C.DisableTorchFunctionSubclass): nothing would see "
            "that its parameters are used. Call the model outside of that context"
        )
    if probe is None:
        return
    for value in tensors_in((args, kwargs)):
        if type(value) is Tensor or isinstance(value, nn.Parameter):
            continue
        if value.is_nested or _hides_parameters(value, probe):
            raise StateError(
                f"an input of {name} is a {type(value).__name__}, whose operations switch __torch_function__ off: nothing would see that parameters "
                f"are used. Give ordinary tensors (nested.to_padded_tensor(0.0), as_subclass(torch.Tensor)), {_COPY}"
            )


def leaves(value: Any) -> Iterator[Any]:
    """Leaves of a value: what is in nested lists, tuples and mappings; or the value itself."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(item)
    else:
        yield value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among the leaves of a value."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def _hides_parameters(value: Tensor, probe: nn.Parameter) -> bool:
    """Tells whether the class of a tensor runs an operation that it shares with a parameter where that parameter's class is not asked."""
    hidden: list[bool] = []

    def operation(*_: Any, **__: Any) -> Tensor:
        hidden.append(not overrides_are_on())
        return torch.empty(0)

    try:
        type(value).__torch_function__(operation, (type(value), type(probe)), (value, probe), {})
    except Exception:
        return False
    return any(hidden)


_MODULES: Final = ("torch.nn.parallel.distributed", "torch.distributed.fsdp")
_INSTEAD: Final = (
    "a session shares the model and averages gradients over ranks itself. Give manage() the bare model, call that one, and give Accelerate's "
    "prepare() loaders only"
)


def expect_unwrapped(model: nn.Module) -> None:
    """Raises StateError where a model, or a part of it, is one of DDP or FSDP."""
    for path, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__module__.startswith(_MODULES):
                where = path or "the model"
                raise StateError(f"{where} is a {kind.__name__} of {kind.__module__}: {_INSTEAD}")


def expect_no_wrapper(what: str) -> None:
    """Raises StateError where DDP or FSDP has led here."""
    for frame in frames():
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(_MODULES):
            name = "DistributedDataParallel" if module == _MODULES[0] else "FSDP"
            raise StateError(f"{what} by {name}, around a managed model or a part of one: {_INSTEAD}")
