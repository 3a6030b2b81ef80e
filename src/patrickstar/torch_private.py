"""The private names of torch that we rely on, in one place; `tests/test_torch_private.py` tests what each must do (torch 2.11 to 2.13)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

__all__ = [
    "Plain",
    "Unseen",
    "at_end_of_backward",
    "backward_id",
    "computes_bf16",
    "computes_fp16",
    "gradient_is_held",
    "inside_backward_node",
    "is_checkpoints",
    "top_saved_tensors_hooks",
    "writes_by_schema",
]

Plain = torch._C.DisableTorchFunctionSubclass
"""Context in which tensor subclasses behave as plain tensors."""

Unseen = torch._C.DisableTorchFunction
"""Context in which neither tensor subclasses nor modes see what is called."""

Packing = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def top_saved_tensors_hooks() -> Packing | None:
    """The (pack, unpack) pair that autograd would call now, or None. Only the topmost pair is ever called."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_checkpoints(hooks: Packing) -> bool:
    """Whether this pair is gradient checkpointing's: what it packs is made again by running the forward again."""
    return hooks[0].__module__ == "torch.utils.checkpoint"


def backward_id() -> int:
    """Number of the backward call running on this thread, the innermost one where they nest; -1 outside."""
    return torch._C._current_graph_task_id()


def inside_backward_node() -> bool:
    """Whether a backward node is being evaluated on this thread."""
    return torch._C._current_autograd_node() is not None


def gradient_is_held(parameter: torch.nn.Parameter) -> bool:
    """Whether anything but the parameter refers to its gradient, or to a view of it."""
    probe = torch.nn.Parameter(torch.empty(1))
    probe.grad = torch.empty(1)
    return _references(parameter) > _references(probe)


def _references(parameter: torch.nn.Parameter) -> int:
    gradient = parameter.grad
    if gradient is None:
        return 0
    storage = gradient.untyped_storage()
    return sys.getrefcount(gradient) + sys.getrefcount(storage) + torch._C._storage_Use_Count(storage._cdata)


def computes_bf16() -> bool:
    """Whether the processor has instructions for products of bf16."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def computes_fp16() -> bool:
    """Whether the processor has instructions for products of fp16."""
    return bool(torch.cpu._is_amx_fp16_supported())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs the callback when the innermost backward call running now ends. Only inside a backward call."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def writes_by_schema(func: Callable[..., Any]) -> bool:
    """Whether this is a registered operation of whose arguments some are written, as its schema says."""
    if isinstance(func, OpOverloadPacket):
        return any(getattr(func, name)._schema.is_mutable for name in func.overloads())
    return isinstance(func, OpOverload) and bool(func._schema.is_mutable)
