"""Changes of a module's own tables: buffers are cast and moved, and given their types and places back; parameters are put on meta."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from patrickstar.step.precision import Precision, lies_in

Kind = tuple[torch.dtype, torch.device]
"""Type and place of a buffer."""


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{prefix}.{name}" if prefix else name, module, name, buffer


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict has, by name."""
    found = _places(model)
    return {path: buffer for path, module, name, buffer in found if name not in module._non_persistent_buffers_set}


def fit_buffers(
    model: nn.Module, precision: Precision, device: torch.device | None, undo: ExitStack
) -> dict[str, Kind]:
    """Casts floating persistent buffers, and moves all of them to where the model computes; gives back what they were, by name.

    Buffers that are not persistent keep their types (rotary frequencies, counters). `device`: None where they stay. `undo`: puts them back.
    """
    before: dict[str, Kind] = {}
    made: dict[int, Tensor] = {}  # one that several modules have stays one
    for path, module, name, buffer in _places(model):
        persistent = name not in module._non_persistent_buffers_set
        dtype = buffer.dtype
        if persistent and buffer.is_floating_point():
            dtype = torch.float32 if lies_in(path, precision.whole) else precision.compute
        place = device or buffer.device
        if (dtype, place) != (buffer.dtype, buffer.device):
            before[path] = (buffer.dtype, buffer.device)
            if id(buffer) not in made:
                made[id(buffer)] = buffer.to(place, dtype)
            undo.callback(module._buffers.__setitem__, name, buffer)
            module._buffers[name] = made[id(buffer)]
    return before


def restore_buffers(model: nn.Module, before: Mapping[str, Kind]) -> None:
    """Gives buffers the types and places they had."""
    for path, module, name, buffer in _places(model):
        if path in before and (buffer.dtype, buffer.device) != before[path]:
            dtype, place = before[path]
            module._buffers[name] = buffer.to(place, dtype)


def put_on_meta(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Puts parameters without bytes in the place of the model's; tied ones stay tied. (A tensor cannot go to meta in place.)"""
    bare = {
        id(each): nn.Parameter(torch.empty(each.shape, dtype=dtypes[name], device="meta"), each.requires_grad)
        for name, each in model.named_parameters()
    }
    for module in model.modules():
        module._parameters.update({key: bare[id(each)] for key, each in module._parameters.items() if id(each) in bare})
