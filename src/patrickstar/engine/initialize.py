"""`initialize_engine`: the entry of PatrickStar 0.4.6."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from patrickstar.comm.ranks import begin_process_group
from patrickstar.config.arguments import MemoryOptions
from patrickstar.config.engine.read import read_config
from patrickstar.config.settings import EngineSettings
from patrickstar.core.chunk_size import GRAIN, target_numel
from patrickstar.deferred.deferred_init import deferred_init
from patrickstar.engine.engine import Engine, EngineOptimizer
from patrickstar.errors import ConfigError, LayoutError
from patrickstar.optim.hyper import Scheduler, build_optimizer
from patrickstar.optim.schedules import rates_of
from patrickstar.session.manage import manage

_log = logging.getLogger("patrickstar")


def initialize_engine(
    model_func: Callable[[], nn.Module] | nn.Module,
    local_rank: int = 0,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    client: None = None,
) -> tuple[Engine, EngineOptimizer]:
    """Builds a model without memory for its parameters, manages it as a config says, and gives an engine and its optimizer.

    The loop is `optimizer.zero_grad(); loss = model(data); model.backward(loss); optimizer.step()`.

    Args:
        model_func: makes the model, under `deferred_init()`; or the model, already built.
        local_rank: number of this process on its machine, as torchrun says; 0 and -1 stand for whichever it is. Under torchrun a process group of
            gloo is made where there is none, and all ranks share the model and each step's batch.
        config: in the form of PatrickStar 0.4.6 and DeepSpeed, or the path of a JSON file. None: Adam with a learning rate of 1e-3, fp32, no bound
            on memory. What becomes of each key is in `docs/deepspeed.md`.
        client: None. The original's chunk manager is a session here, and made by itself.
    Raises:
        ConfigError: with every problem of the config, or of what was passed. LayoutError: a model that cannot be built without memory, or
            managed. BudgetError, DeviceError, CheckpointError: see `patrickstar.manage`.
    """
    if client is not None:
        raise ConfigError(
            f'client={type(client).__name__}: leave it out; budgets are under "patrickstar" in the config, such as {{"host_memory": "24GiB"}}'
        )
    rank, ranks = _find_ranks(local_rank)
    settings = read_config(config, ranks=ranks)
    if rank == 0:
        settings.tell(_log)
    model = _build(model_func)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError(f"no parameter of {type(model).__name__} has requires_grad: there is nothing to train")
    original = build_optimizer(trained, settings.optimizer)
    memory = memory_for(model, settings.memory, settings)
    session = manage(model, original, **{field.name: getattr(memory, field.name) for field in fields(memory)})
    assert session.optimizer is not None
    if session.unclosed is not None:
        session.unclosed.detach()  # the original has no close(): its loop just ends
    scheduler = None if settings.schedule is None else Scheduler(session.optimizer, rates_of(settings.schedule))
    accumulate, printed = settings.accumulate, settings.values.get("steps_per_print") if rank == 0 else None
    optimizer = EngineOptimizer(session, accumulate=accumulate, lr_scheduler=scheduler, steps_per_print=printed)
    engine = Engine(model, session, optimizer, accumulate=accumulate, micro_batch_size=settings.micro_batch_size)
    return engine, optimizer


def _find_ranks(local_rank: int) -> tuple[int, int]:
    """The place of this rank and the number of ranks, of a process group that is made where torchrun has started several without one."""
    here = int(os.environ.get("LOCAL_RANK", "0"))
    if isinstance(local_rank, bool) or not isinstance(local_rank, int) or local_rank not in (0, -1, here):
        known = f"{here}, 0 or -1: torchrun has started this process as local rank {here}" if here else "0, or -1"
        raise ConfigError(f"local_rank={local_rank!r}: expected {known}")
    if not dist.is_available():
        return 0, 1
    if dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1:
        begin_process_group()
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _build(model_func: Callable[[], nn.Module] | nn.Module) -> nn.Module:
    if isinstance(model_func, nn.Module):
        return model_func
    if not callable(model_func):
        raise ConfigError(
            f"model_func is a {type(model_func).__name__}: expected a function that makes a model, or a model"
        )
    try:
        with deferred_init():
            model = model_func()
    except LayoutError as error:
        raise LayoutError(
            f"{error}. Or build the model in memory first, and pass it in the place of model_func: initialize_engine(model, ...)"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model_func gave a {type(model).__name__}: expected a torch.nn.Module")
    return model


def memory_for(model: nn.Module, memory: MemoryOptions, settings: EngineSettings) -> MemoryOptions:
    """Arguments of `manage`, with what a config says that depends on the model or the device."""
    is_gpu = memory.device is not None and memory.device.startswith("cuda")
    share = settings.values.get("client.mem_tracer.overall_gpu_mem_ratio")
    if share is not None and not is_gpu:
        _log.info("config: no effect: client.mem_tracer.overall_gpu_mem_ratio (patrickstar.device is no GPU)")
    elif share is not None and memory.device_memory is None:
        memory = replace(memory, device_memory=f"{share * 100:.10g}%")
    hint = settings.values.get("default_chunk_size")
    numel = sum(parameter.numel() for parameter in model.parameters())
    options = memory.options
    if hint is not None and options.chunk_size is None and hint < target_numel(numel):
        options = replace(options, chunk_size=max(hint - hint % GRAIN, GRAIN))
    if settings.values.get("use_cpu_embedding") and options.tile_rows is None:
        options = replace(options, tile_rows=_rows_of_a_tile(model, options.chunk_size or target_numel(numel)))
    return replace(memory, options=options)


def _rows_of_a_tile(model: nn.Module, chunk_numel: int) -> int | None:
    """Rows of which a tile has about a chunk's elements, and no linear layer more: then only tables are in tiles, and no bit changes.

    None: no table has more rows, or a linear layer shares it.
    """
    modules = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)]
    tables = [module.weight.shape for module in modules if isinstance(module, nn.Embedding)]
    linear = max((module.weight.shape[0] for module in modules if isinstance(module, nn.Linear)), default=1)
    rows = max([linear, *(chunk_numel // max(1, width) for _, width in tables)])
    return rows if any(table > rows for table, _ in tables) else None
