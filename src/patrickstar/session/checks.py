"""Checks before anything is changed: what a model must be to be managed, and what all ranks must have alike to share it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

import torch
from torch import Tensor, nn

from patrickstar.comm.collectives import Collectives
from patrickstar.comm.ranks import Ranks
from patrickstar.comm.transport import staging_bytes
from patrickstar.core.machine import Tier
from patrickstar.core.shard_layout import ShardLayout
from patrickstar.deferred.deferred_init import deferred_by, is_building
from patrickstar.deferred.recipe import is_dense
from patrickstar.errors import ConfigError, LayoutError, RankError, StateError
from patrickstar.optim.user_optimizer import read_state
from patrickstar.parameters.transforms import expect_unwrapped
from patrickstar.parameters.whole_parameters import manager_of
from patrickstar.session.start import Setup

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_model(model: object) -> dict[str, nn.Parameter]:
    """The model's parameters by name, each once, in registration order. ConfigError, StateError, LayoutError: why it cannot be managed."""
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


def expect_alike(
    named: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    setup: Setup,
    collectives: Collectives,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Raises RankError where ranks have other models, values, optimizers, options or versions: which, and what.

    `shapes`: of whole parameters, where ranks have different blocks of them: values are not compared then.
    """
    whole = setup.layout.whole if isinstance(setup.layout, ShardLayout) and shapes is None else ""
    groups = [] if optimizer is None else optimizer.param_groups
    names = {id(parameter): name for name, parameter in named.items()}
    states = {} if optimizer is None else read_state(optimizer, names)
    alike = [
        {key: [names[id(p)] for p in value] if key == "params" else value for key, value in group.items()}
        for group in groups
    ]
    # The directory is each rank's own, and in the mesh each has another place.
    given = [one.name for one in fields(setup.memory) if one.name not in {"disk", "mesh"}]
    options = {name: getattr(setup.memory, name) for name in given}
    host_bytes = setup.budgets.machine.budget[Tier.HOST] if setup.budgets.host_binds else None
    device = setup.budgets.device
    parameters = {name: (*(shapes or {}).get(name, p.shape), p.dtype) for name, p in named.items()}
    values = _digest(named.values() if shapes is None else ())
    moments = _digest(m for state in states.values() if shapes is None for m in (state.exp_avg, state.exp_avg_sq))
    counts = {name: state.step for name, state in states.items()}
    asked = f"{options} {device.type} {host_bytes} {setup.precision.compute} {whole}"
    groups_alike = f"{type(optimizer).__name__} {alike}"
    facts = {
        "the version of torch": (torch.__version__, "install the same one for all ranks"),
        "the parameters": (str(parameters), "build the same model on all ranks"),
        "the optimizer": (groups_alike, "give all ranks the same optimizer with the same groups"),
        "the options": (asked, "give manage() the same arguments on all ranks"),
        "the values of parameters": (values, "call torch.manual_seed(0) before the model is built, on all ranks"),
        "the optimizer's state": (f"{counts}{moments}", "load the same one on all ranks, or none"),
    }
    mine = {name: hashlib.sha256(fact.encode()).hexdigest() for name, (fact, _) in facts.items()}
    mine["GPU"] = (
        "" if device.type == "cpu" or staging_bytes(device) else str(torch.cuda.get_device_properties(device).uuid)
    )
    of_all = collectives.agree(mine, "what manage() was given")
    ranks = collectives.ranks
    for name, (_, advice) in facts.items():
        others = tuple(rank for rank, theirs in enumerate(of_all) if theirs[name] != of_all[0][name])
        if others:
            raise RankError(
                f"manage(): {name} differ between {ranks.names([0])} and {ranks.names(others)}: {advice}",
                ranks=ranks.numbers(others),
                action="manage()",
                reason=f"{name} differ",
            )
    expect_a_gpu_each([theirs["GPU"] for theirs in of_all], ranks)


def expect_a_gpu_each(gpus: Sequence[str], ranks: Ranks) -> None:
    """Raises RankError where two ranks are on one GPU, of which NCCL takes one. `gpus`: of all ranks; empty where NCCL is not used."""
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        if gpu and first < rank:
            reason = f"{ranks.names([first, rank])} compute on the same GPU, {gpu}"
            raise RankError(
                f"manage(): {reason}, and NCCL takes one rank on each: start no more ranks than there are GPUs, and leave device= out",
                ranks=ranks.numbers([first, rank]),
                action="manage()",
                reason=reason,
            )


def _digest(tensors: Iterable[Tensor]) -> str:
    """The digest of the values that are there, and of what makes those that are not."""
    found = hashlib.sha256()
    for tensor in tensors:
        recorder = deferred_by(tensor)
        if recorder is not None:
            found.update(recorder.digest(tensor))
        else:
            found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
