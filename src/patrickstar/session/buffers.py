"""Changes of a module's own tables: persistent buffers are cast and given their types back, parameters put on meta."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from patrickstar.parameters.bound import names_by_id
from patrickstar.step.precision import Precision, lies_in

__all__ = ["cast_buffers", "persistent_buffers", "put_back", "put_on_meta", "restore_buffers"]


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, module, name, buffer


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict has, by name."""
    return {path: buffer for path, _, _, buffer in _places(model)}


def cast_buffers(model: nn.Module, precision: Precision) -> dict[str, torch.dtype]:
    """Casts floating persistent buffers; gives back the types they had, by name. Others keep theirs (rotary frequencies, counters)."""
    before: dict[str, torch.dtype] = {}
    for path, module, name, buffer in _places(model):
        wanted = torch.float32 if lies_in(path, precision.whole) else precision.compute
        if buffer.is_floating_point() and buffer.dtype is not wanted:
            before[path] = buffer.dtype
            module._buffers[name] = buffer.to(wanted)
    return before


def put_back(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Puts the given tensors themselves in the place of the model's buffers of their names."""
    for path, module, name, _ in _places(model):
        module._buffers[name] = buffers[path]


def restore_buffers(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Gives buffers the types they had."""
    for path, module, name, buffer in _places(model):
        if path in dtypes and buffer.dtype is not dtypes[path]:
            module._buffers[name] = buffer.to(dtypes[path])


def put_on_meta(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Puts parameters without bytes in the place of the model's; tied ones stay tied. (A tensor cannot go to meta in place.)"""
    made: dict[int, nn.Parameter] = {}
    names = names_by_id(dict(model.named_parameters()))
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None or id(parameter) not in names:
                continue
            if id(parameter) not in made:
                bare = torch.empty(parameter.shape, dtype=dtypes[names[id(parameter)]], device="meta")
                made[id(parameter)] = nn.Parameter(bare, parameter.requires_grad)
            module._parameters[key] = made[id(parameter)]
