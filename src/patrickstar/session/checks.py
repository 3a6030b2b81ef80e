"""Checks of what a model must be to be managed. Look, and change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from patrickstar.deferred.deferred_init import deferred_by, is_building
from patrickstar.deferred.operations import is_dense
from patrickstar.errors import ConfigError, LayoutError, StateError
from patrickstar.parameters.transforms import expect_unwrapped
from patrickstar.parameters.whole_parameters import manager_of

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_model(model: object) -> dict[str, nn.Parameter]:
    """The model's parameters by name, each once, in registration order.

    Raises:
        ConfigError: it is no module. StateError: it is managed already, or compiled. LayoutError: its parameters cannot be laid out.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; manage() takes a torch.nn.Module")
    if is_building():
        raise StateError("the model is being built: call manage() after the `with patrickstar.deferred_init():` block")
    named = dict(model.named_parameters())
    if any(hasattr(parameter, "placements") for parameter in named.values()):  # DTensors
        expect_unwrapped(model)
    if not named:
        raise LayoutError("the model has no parameters: there is nothing to manage")
    for name, parameter in named.items():
        manager = manager_of(parameter)
        if manager is not None:
            raise StateError(f"{name} is managed already, by {manager.session_name}: close that session first")
        _check_parameter(name, parameter)
    devices = {str(parameter.device) for parameter in named.values()}
    if len(devices) > 1:
        raise LayoutError(
            f"parameters are on several devices ({', '.join(sorted(devices))}): move the model to the CPU first"
        )
    _check_memory(named, dict(model.named_buffers()))
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise LayoutError(
                f"{path or 'the model'} has sparse gradients, which cannot be managed: build it with sparse=False"
            )
    return named


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise LayoutError(
            f"{name} has no shape yet: run one forward, or build the module with its sizes, before manage()"
        )
    if parameter.device.type == "meta":
        raise LayoutError(f"{name} is on the meta device and has no values: give it some before manage()")
    if parameter.device.type != "cpu":
        raise LayoutError(f"{name} is on {parameter.device}: move the model to the CPU before manage()")
    if parameter.layout is not torch.strided:
        raise LayoutError(f"{name} has layout {parameter.layout}: only dense parameters can be managed")
    if parameter.dtype not in FLOATS:
        kind = "complex" if parameter.is_complex() else "quantised or integer"
        raise LayoutError(f"{name} is {parameter.dtype}: {kind} parameters cannot be managed")
    if type(parameter) is not nn.Parameter and deferred_by(parameter) is None:
        raise LayoutError(
            f"{name} is a {type(parameter).__name__}: only torch.nn.Parameter can be managed, not subclasses of it"
        )


def _check_memory(named: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
    """Refuses two parameters, or one and a buffer, over the same bytes, which would be taken apart: what is written to one would no longer reach
    the other.
    """
    # Of parameters with gaps between their elements, others may lie in the gaps: they are not looked at.
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in (*named.items(), *buffers.items())
        if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and tensor.layout is torch.strided
        if tensor.numel() and is_dense(tensor)
    )
    pairs = itertools.chain(itertools.pairwise(spans), itertools.pairwise(_deferred_spans(named)))
    for (_, end, name), (start, _, other) in pairs:
        if start < end and not (name in buffers and other in buffers):
            raise LayoutError(
                f"{name} and {other} share memory: make them one (`model.b.weight = model.a.weight`), or give each its own "
                "(`nn.Parameter(weight.clone())`)"
            )


def _deferred_spans(named: Mapping[str, nn.Parameter]) -> list[tuple[int, int, str]]:
    """Spans of parameters built under `deferred_init()`, counted as if their storages lay one after the other."""
    starts: dict[object, int] = {}
    spans = []
    end = 0
    for name, parameter in named.items():
        recorder = deferred_by(parameter)
        if recorder is not None and parameter.numel():
            cell = recorder.cell(parameter)
            assert cell is not None, f"{name} has no record"
            start = starts.setdefault(cell, end)
            if start == end:
                end += cell.nbytes
            first = start + int(parameter.storage_offset()) * parameter.element_size()
            spans.append((first, first + parameter.nbytes, name))
    return sorted(spans)
