"""Persistent buffers: found, cast as parameters are, and given their types back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

__all__ = ["cast_buffers", "persistent_buffers", "restore_buffers"]


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, module, name, buffer


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict has, by name."""
    return {path: buffer for path, _, _, buffer in _places(model)}


def cast_buffers(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Casts floating persistent buffers; gives back the types they had, by name. Others keep theirs (rotary frequencies, counters)."""
    before: dict[str, torch.dtype] = {}
    for path, module, name, buffer in _places(model):
        if buffer.is_floating_point() and buffer.dtype is not dtype:
            before[path] = buffer.dtype
            module._buffers[name] = buffer.to(dtype)
    return before


def restore_buffers(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Gives buffers the types they had."""
    for path, module, name, buffer in _places(model):
        if path in dtypes and buffer.dtype is not dtypes[path]:
            module._buffers[name] = buffer.to(dtypes[path])
