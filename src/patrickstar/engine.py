"""The engine of PatrickStar 0.4.6 and of DeepSpeed: a module that runs its own backward and step, its optimizer, and the entry to both."""

from __future__ import annotations

import logging
import os
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from patrickstar.comm.ranks import begin_process_group
from patrickstar.config.arguments import MemoryOptions
from patrickstar.config.engine.read import read_config
from patrickstar.config.settings import EngineSettings
from patrickstar.core.chunk_size import GRAIN, target_numel
from patrickstar.deferred.deferred_init import deferred_init
from patrickstar.errors import ConfigError, LayoutError, StateError
from patrickstar.optim.hyper import Scheduler, build_optimizer
from patrickstar.optim.managed import ManagedOptimizer
from patrickstar.optim.schedules import rates_of
from patrickstar.session.manage import manage
from patrickstar.session.session import Session

_log = logging.getLogger("patrickstar")


class LoadedKeys(NamedTuple):
    """Keys that `load_state_dict` left out."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Engine(nn.Module):
    """The engine that `initialize_engine` gives: the model, called as it was, with `backward` and `step`.

    Attributes:
        module: the model. session: what manages it, a `patrickstar.Session`, with stats, plan and export. optimizer: what `step` steps.
    """

    def __init__(
        self, module: nn.Module, session: Session, optimizer: EngineOptimizer, *, micro_batch_size: int | None
    ) -> None:
        super().__init__()
        self.module = module
        self.session = session
        self.optimizer = optimizer

        self._micro_batch_size = micro_batch_size
        self.train()

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The config's scheduler of rates, or None; the optimizer's step advances it."""
        return self.optimizer.lr_scheduler

    @property
    def global_steps(self) -> int:
        """Steps so far, those that fp16 skipped included."""
        return self.optimizer.global_steps

    @property
    def skipped_steps(self) -> int:
        """Steps that fp16 skipped, because gradients overflowed."""
        return self.optimizer.skipped_steps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """The backward of a loss, divided by the number of micro-batches of a step, and in fp16 scaled."""
        if self.optimizer._accumulate > 1:
            loss = loss / self.optimizer._accumulate
        self.session.scaler.scale(loss).backward(retain_graph=retain_graph)

    def step(self) -> None:
        """Ends a micro-batch as DeepSpeed does: at a boundary an update, and no gradients afterwards."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's: nothing between two boundaries."""
        self.optimizer.zero_grad(set_to_none)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tells whether the present micro-batch is the last one of its step."""
        return self.optimizer.at_boundary

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self.optimizer._accumulate

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples of a micro-batch, where the config says."""
        return self._micro_batch_size

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> Mapping[str, Tensor]:  # type: ignore[override]
        """The model's keys, parameters in fp32, each read when it is asked for: see `Session.state_dict`.

        `torch.save` writes it as an ordinary state dict; `dict(...)` holds all of it.
        """
        return self.session.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = False) -> LoadedKeys:  # type: ignore[override]
        """Takes over weights and persistent buffers, and says which keys were left out.

        Args:
            strict: refuse missing and unexpected keys.
        Raises:
            ConfigError: keys, with `strict`, or other shapes. Nothing has changed then.
        """
        own = self.session.state_dict()
        left_out = LoadedKeys(
            [key for key in own if key not in state_dict], [key for key in state_dict if key not in own]
        )
        if strict:
            self.session.load_state_dict(state_dict)
        else:
            known = {key: state_dict[key] for key in state_dict if key in own}
            self.session.load_state_dict(ChainMap(known, own))  # type: ignore[arg-type]
        return left_out

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | None = None, client_state: Mapping[str, Any] | None = None
    ) -> Path:
        """Writes all that training goes on from to `save_dir/step-...`, and gives that directory: see `Session.save_checkpoint`.

        Args:
            client_state: JSON values, tensors, and objects with `state_dict`, which `load_checkpoint` gives back.
        Raises:
            StateError: gradients of some micro-batches are waiting for the others. ConfigError: a tag.
        """
        _expect_no_tag(tag)
        waiting = self.optimizer.micro_steps
        if waiting:
            raise StateError(
                f"save_checkpoint() after {waiting} of {self.optimizer._accumulate} micro-batches, whose gradients are in no checkpoint: "
                "save where global_steps has just grown"
            )
        extra = {
            "engine": {"global_steps": self.global_steps, "skipped_steps": self.skipped_steps},
            "lr_scheduler": self.lr_scheduler,
            "client_state": dict(client_state or {}),
        }
        return self.session.save_checkpoint(
            save_dir, extra={name: value for name, value in extra.items() if value is not None}
        )

    def load_checkpoint(self, load_dir: str | Path, tag: str | None = None) -> tuple[Path, dict[str, Any]]:
        """Goes on from a checkpoint, the newest in `load_dir` or that of one step; gives its place and the `client_state`.

        Raises:
            CheckpointError: it is damaged, of another model, or no engine's. ConfigError: a tag.
        """
        _expect_no_tag(tag)
        extra = self.session.load_checkpoint(load_dir)
        if self.lr_scheduler is not None and "lr_scheduler" in extra:
            self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        counts = extra["engine"]  # at a boundary
        self.optimizer.global_steps, self.optimizer.skipped_steps = counts["global_steps"], counts["skipped_steps"]
        self.optimizer.micro_steps = 0
        return Path(load_dir), extra["client_state"]

    def close(self) -> None:
        """Gives the model ordinary parameters again: see `Session.close`."""
        self.session.close()

    def __getstate__(self) -> NoReturn:
        raise StateError("an engine cannot be copied or pickled: copy engine.module, or use save_checkpoint(dir)")


def _expect_no_tag(tag: str | None) -> None:
    if tag is not None:
        raise ConfigError(f"tag={tag!r}: a checkpoint is named by its step; leave it out, or name another directory")


class EngineOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose `step()` counts micro-batches, and updates at every so manieth.

    Between these boundaries `step()` and `zero_grad()` do nothing. At a boundary the loss scaler of fp16 decides whether there is an
    update, and the schedule of the config goes on where there was one. `param_groups` are the session's own: changes of them
    take effect at the next update, and schedulers of torch may be built on this object. Its hooks run when there is an update.

    Attributes:
        global_steps: boundaries so far, skipped ones included. skipped_steps: those without an update, because gradients overflowed.
        lr_scheduler: that of the config, or None.
    """

    def __init__(
        self, session: Session, *, accumulate: int, lr_scheduler: LRScheduler | None, steps_per_print: int | None
    ) -> None:
        assert session.optimizer is not None, "a session that trains has one"
        self._managed: ManagedOptimizer = session.optimizer
        # Not Optimizer.__init__, which makes groups of its own: what unpickling calls sets up hooks and nothing else.
        self.__setstate__({"defaults": self._managed.defaults})
        self._session = session
        self._accumulate = accumulate
        self.lr_scheduler = lr_scheduler
        self._steps_per_print = steps_per_print

        self.global_steps = 0
        self.skipped_steps = 0
        self.micro_steps: int = 0
        """Micro-batches since the last boundary."""
        self._updated = False
        # Hooks run before and after every update.
        self.register_step_pre_hook = self._managed.register_step_pre_hook  # type: ignore[method-assign]
        self.register_step_post_hook = self._managed.register_step_post_hook  # type: ignore[method-assign]
        self.register_step_post_hook(lambda *_: setattr(self, "_updated", True))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The session's list of groups, not a copy."""
        return self._managed.param_groups

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]
        """The state of Adam by parameter, as `ManagedOptimizer.state` has it."""
        return self._managed.state

    @property
    def at_boundary(self) -> bool:
        """Tells whether the next `step()` ends a step."""
        return self.micro_steps + 1 >= self._accumulate

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Ends a micro-batch, and at a boundary the step: update, scale, schedule.

        Raises:
            StateError: a closure with fp16 or accumulation; gradients overflow at the smallest loss scale.
        """
        if closure is not None and (self._accumulate > 1 or self._session.scaler.is_enabled()):
            raise StateError("step(closure) with fp16 or gradient accumulation: compute the loss before step()")
        if not self.at_boundary:
            self.micro_steps += 1
            return None
        self.micro_steps, self._updated = 0, False
        scaler = self._session.scaler
        loss = scaler.step(self._managed) if closure is None else self._managed.step(closure)
        self.global_steps += 1
        if self._updated:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        else:
            self.skipped_steps += 1
        if scaler.is_enabled():
            scaler.update()
        if self._steps_per_print is not None and self.global_steps % self._steps_per_print == 0:
            rates, betas = ([group[name] for group in self.param_groups] for name in ("lr", "betas"))
            _log.info("step=%d, skipped=%d, lr=%s, mom=%s", self.global_steps, self.skipped_steps, rates, betas)
        return loss

    # As in ManagedOptimizer: torch would run the global hooks once more.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients at a boundary, as in torch; nothing between two, where gradients add up."""
        if self.micro_steps == 0:
            self._managed.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters of the model."""
        self._managed.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer in the format of torch's class."""
        return self._managed.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what this class or torch's saved."""
        self._managed.load_state_dict(state_dict)

    def __getstate__(self) -> NoReturn:
        raise StateError(
            "the optimizer of an engine cannot be copied or pickled: use state_dict() and load_state_dict()"
        )


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
    printed = settings.values.get("steps_per_print") if rank == 0 else None
    optimizer = EngineOptimizer(
        session, accumulate=settings.accumulate, lr_scheduler=scheduler, steps_per_print=printed
    )
    return Engine(model, session, optimizer, micro_batch_size=settings.micro_batch_size), optimizer


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
