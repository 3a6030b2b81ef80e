"""Inputs of a forward in the type that computes. The copies are activations as any others: they are made, and counted, inside of the stretch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """Inputs with floating tensors in this type, in nested containers too; what needs no cast is the very same object."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and not _stays(value, dtype) else value
    if type(value) is dict:
        items = {name: cast_inputs(item, dtype) for name, item in value.items()}
        return items if any(items[name] is not value[name] for name in value) else value
    if isinstance(value, list | tuple):
        cast = [cast_inputs(item, dtype) for item in value]
        if all(new is old for new, old in zip(cast, value, strict=True)):
            return value
        return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)
    return value


def _stays(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Tells whether a floating input is of the type, or has 16 bits under autocast that fp32 would undo: each operation chooses a type there."""
    widens = dtype is torch.float32 and tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.dtype is dtype or (widens and torch.is_autocast_enabled(tensor.device.type))
