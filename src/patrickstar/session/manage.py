"""`patrickstar.manage`, and the assembly of a session: its memory, the parts that take steps over that, what both have to do with the model."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patrickstar.comm.all_ranks import AllRanks
from patrickstar.comm.collectives import Collectives
from patrickstar.comm.job import ElasticJob, job_of_environment
from patrickstar.comm.ranks import Ranks, ranks_of
from patrickstar.comm.transport import staging_bytes
from patrickstar.config.arguments import MemoryOptions, check_arguments
from patrickstar.config.kinds import refuse
from patrickstar.config.options import LossScale, Options
from patrickstar.core.machine import Tier
from patrickstar.core.planes import GradientUse
from patrickstar.core.shard_layout import RankOf
from patrickstar.errors import BudgetError, RankError
from patrickstar.memory.disk import expect_usable
from patrickstar.memory.works_under_way import MakeLane
from patrickstar.optim.choose import choose_kernels
from patrickstar.optim.managed import ManagedOptimizer
from patrickstar.optim.user_optimizer import check_optimizer
from patrickstar.parallel.group import MeshGroup
from patrickstar.parallel.tensor_2d import cuts_of, grid_of
from patrickstar.parallel.transformer_models import groups_of
from patrickstar.parameters.bound import names_by_id
from patrickstar.parameters.transforms import expect_unwrapped
from patrickstar.plan.fit import of_machine
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.session.adopt import take_over
from patrickstar.session.buffers import fit_buffers
from patrickstar.session.build import Ground, MakeMesh, watch
from patrickstar.session.checks import check_model, expect_alike
from patrickstar.session.close import Closing
from patrickstar.session.loading import Loading
from patrickstar.session.mesh_tensors import MeshTensors
from patrickstar.session.optimizer_target import OptimizerTarget
from patrickstar.session.parts import Parts
from patrickstar.session.resizing import Resizing
from patrickstar.session.scaler import LossScaler
from patrickstar.session.session import Session
from patrickstar.session.start import Setup, set_up
from patrickstar.step.budgets import find_resources, resolve_device
from patrickstar.step.mesh_ranks import MeshRanks
from patrickstar.step.resources import bound_kernels, uncounted_settings

_log = logging.getLogger("patrickstar")


def manage(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: str | None = None,
    precision: str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    disk: str | Path | None = None,
    disk_memory: int | str | None = None,
    states: str = "exact",
    step: str = "deferred",
    max_grad_norm: float | None = None,
    weights: str | Path | None = None,
    activations: str = "model",
    mesh: object | None = None,
    options: Options | None = None,
    **unknown: Any,
) -> Session:
    """Puts a model's parameters, gradients and optimizer states into chunks that move between tiers of memory.

    The training loop stays as it is, with `session.optimizer` in place of the optimizer. No budget changes a bit of any result.

    Args:
        model: any module with dense floating parameters on the CPU. A master starts from the value a parameter has now, or gets from
            the initialisation that `deferred_init` has recorded.
        optimizer: torch's or patrickstar's Adam or AdamW over parameters of the model, whose groups and state are taken over. None: weights
            only are managed, for evaluation.
        device: "cpu"; "cuda", or "cuda:1"; "emulated": a bounded arena of host memory plays a device. None: CUDA where there is one, else "cpu".
        precision: "bf16": the weight is the upper half of an fp32 master. "fp16": it is rounded from one, and `session.scaler` scales the loss.
            None: the type that most elements of the model's parameters have.
        device_memory: budget of the device: chunks and activations. Sizes are bytes, or text such as "512MiB", "1.5GB", "70%". None: 90 % of the
            free memory of a GPU, less a reserve for its libraries; of the emulated device as much as the host's.
        host_memory: how much the process may grow, not counting the weights taken over. None: 80 % of the available memory.
        disk, disk_memory: directory and budget of the disk tier. None: no disk tier; 90 % of the free space.
        step: "deferred", at `optimizer.step()`, or "in_backward", as gradients arrive.
        max_grad_norm: clips the global norm at every step.
        options: see `Options`; nobody should need it.
        weights: safetensors file, or directory as `save_pretrained` leaves it: values that replace the model's, one tensor at a time.
        states, activations: their default only, until a later version.
        mesh: `DeviceMesh` with a dimension "dp": the ranks that share the model. None: those of the default process group, if there is one.
    Raises:
        ConfigError, LayoutError, StateError, BudgetError, CheckpointError, DeviceError: model and optimizer are then as before.
    """
    known = {name: value for name, value in locals().items() if name not in ("model", "optimizer", "unknown")}
    check_arguments(**known, **unknown)
    return assemble(model, optimizer, **known)


def assemble(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    make_lane: MakeLane | None = None,
    choice: UpdateChoice = UpdateChoice(),  # noqa: B008  (frozen)
    **arguments: Any,
) -> Session:
    """Does what `manage` does with these arguments, with parts exchanged for others that keep the same contract: no bit may depend on which.

    `make_lane`: lanes in place of those that the options ask for. `choice`: when chunks are updated.
    """
    memory = check_arguments(**arguments)
    groups = groups_of(model) if isinstance(model, nn.Module) else {}
    job = job_of_environment()
    if job is None:
        makers = ranks_of(memory.mesh, {name: group.size for name, group in groups.items()})
    else:
        _expect_elastic(memory, optimizer, groups)
        makers = (partial(job.ranks, job.now) if job.rank >= 0 and job.now.size > 1 else None, None)
    # First of all: the others hear of whatever this rank refuses.
    kind = RankError if job is None else job.loss
    made = [make and Collectives(make(), timeout_s=memory.options.collective_timeout, kind=kind) for make in makers]
    collectives, everyone = made
    try:
        return _assembled(
            model, optimizer, memory, collectives, everyone, groups=groups, job=job, make_lane=make_lane, choice=choice
        )
    except BaseException as error:
        there = [one for one in made if one is not None]
        for one in there:
            one.close(f"{one.me}: manage() has ended with {type(error).__name__}: {error}")
        if isinstance(error, BudgetError) and there:
            staging, here = staging_bytes(resolve_device(memory.device)), there[0].ranks.local_size
            raise of_machine(error, error.smallest_bytes, here, staging_bytes=staging) from None
        raise


def _assembled(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    memory: MemoryOptions,
    collectives: Collectives | None,
    everyone: Collectives | None,
    *,
    groups: Mapping[str, MeshGroup],
    job: ElasticJob | None,
    make_lane: MakeLane | None,
    choice: UpdateChoice,
) -> Session:
    named = check_model(model)
    if optimizer is not None:
        check_optimizer(optimizer, names_by_id(named))
    has = find_resources(memory)
    ranks = None if collectives is None else collectives.ranks
    of_all = ranks if everyone is None else everyone.ranks
    if of_all is not None:
        expect_unwrapped(model)
        expect_known_over_ranks(model, memory, of_all, device=has.device, in_blocks=everyone is not None)
        has = replace(has, staging_bytes=staging_bytes(has.device))
    source = Loading(model, named, memory.weights) if memory.weights is not None else None
    if memory.disk is not None:
        expect_usable(memory.disk)
    setup = set_up(
        model,
        named,
        memory,
        has,
        # A frozen parameter needs more than its weight where it has a gradient or moments already.
        trained=lambda p: optimizer is not None and (p.requires_grad or p.grad is not None or p in optimizer.state),
        trains=optimizer is not None,
        find_passes=choose_kernels,
        ranks=ranks if job is None else None,
        everyone=of_all if job is None else RankOf(0, 1, job.most),
        sizes=() if job is None else range(job.least, job.most + 1),
    )
    if setup.budgets.host_binds and setup.budgets.machine.compute is Tier.HOST:
        bound_kernels(os.environ, set_aside_bytes=setup.budgets.machine.costs.set_aside_bytes)
    uncounted = uncounted_settings(os.environ) if setup.budgets.stream_device is not None else []
    if uncounted:
        _log.warning(
            "PYTORCH_ALLOC_CONF has %s: with that torch gives out larger blocks than plans count, and a step may take more of the device than its "
            "budget before the next is planned with it",
            " and ".join(uncounted),
        )
    ground = Ground(
        model=model, named=named, optimizer=optimizer, setup=setup, make_lane=make_lane, choice=choice, groups=groups
    )
    if job is not None and job.rank < 0:
        return _waiting(ground, job)
    return _begin(ground.parts(collectives, partial(_meet, ground, collectives, everyone)), ground, source, job)


def _expect_elastic(
    memory: MemoryOptions, optimizer: torch.optim.Optimizer | None, groups: Mapping[str, MeshGroup]
) -> None:
    """Raises ConfigError for what an elastic job cannot have."""
    refused = {
        "mesh=": memory.mesh is not None,
        "a model that works together over a mesh": bool(groups),
        'step="in_backward"': memory.step == "in_backward",
        "Options(tile_rows=)": memory.options.tile_rows is not None,
        "weights without an optimizer": optimizer is None,
    }
    refuse([f"{what} in an elastic job comes later" for what, asked in refused.items() if asked], of="manage")


def _waiting(ground: Ground, job: ElasticJob) -> Session:
    """A session of a process that is none of the ranks of its job yet: it has no states, and the model no values."""
    session = Session(None, ground.setup.layout, None)
    assert ground.optimizer is not None
    buffers = fit_buffers(ground.model, ground.setup.precision, ground.setup.budgets.stream_device, ExitStack())
    _attach(session, ground)
    ground.optimizer.state.clear()
    ground.lay_bare()
    session.resizing = Resizing(ground=ground, job=job, parts=None, installed=session.installed, buffers=buffers)
    return session


def _attach(session: Session, ground: Ground) -> ManagedOptimizer | None:
    """Has the session's optimizer, and what scales losses, stand in the place of the user's."""
    original, setup = ground.optimizer, ground.setup
    if original is None:
        return None
    parts, names = session.present, names_by_id(ground.named)
    target = None if parts is None else OptimizerTarget(parts, original)
    session.optimizer = managed = ManagedOptimizer(original, target=target, names=names)
    if setup.precision.scales and setup.gradients is GradientUse.CHUNK:
        scale = setup.memory.options.loss_scale or LossScale()
        training: Any = None if parts is None else parts.training
        session.scaler = LossScaler(scale, training, managed, original)
    return managed


def _meet(
    ground: Ground, collectives: Collectives | None, everyone: Collectives | None, setup: Setup
) -> MakeMesh | None:
    """Sees that ranks are alike; of a model in blocks, gives what makes its whole tensors."""
    model, named, optimizer = ground.model, ground.named, ground.optimizer
    if collectives is not None:
        expect_alike(named, optimizer, setup, collectives)
    if everyone is None:
        return None
    grid, cuts = grid_of(model), cuts_of(model)
    assert grid is not None
    expect_alike(named, optimizer, setup, everyone, {name: cuts[name].shape for name in named})
    counted = frozenset(name for name in named if cuts[name].first(grid.place) == grid.place)
    return partial(MeshTensors, MeshRanks.meet(everyone, grid.place, grid.q, counted), grid, cuts)


def expect_known_over_ranks(
    model: nn.Module, memory: MemoryOptions, ranks: Ranks, *, device: str, in_blocks: bool = False
) -> None:
    """Raises ConfigError where what is asked for does not go over ranks yet. `device`: what computes; in_blocks: a model of matrices in blocks."""
    refused = {
        'step="in_backward"': memory.step == "in_backward",
        f'matrices in blocks, device="{device}"': in_blocks and device not in ("cpu", "emulated"),
        "weights= of blocks": in_blocks and memory.weights is not None,
    }
    problems = [f"{what} over {ranks.size} ranks comes later" for what, asked in refused.items() if asked]
    if any(parameter.grad is not None for parameter in model.parameters()):
        problems.append(
            f"there are gradients from before manage(), over {ranks.size} ranks: each rank's own, or averaged? Call optimizer.zero_grad() first"
        )
    refuse(problems, of="manage")


def _begin(parts: Parts, ground: Ground, source: Loading | None, job: ElasticJob | None) -> Session:
    """The session over its parts: hooks on the model, the optimizer in its place, all values in chunks."""
    setup, store = ground.setup, parts.executor.store
    with ExitStack() as undo:  # whatever fails, model and optimizer are as before
        undo.callback(store.close)
        hooks = undo.enter_context(watch(parts))
        buffers = fit_buffers(parts.model, setup.precision, setup.budgets.stream_device, undo)
        session = Session(parts, parts.layout, partial(Closing, parts, hooks, ground.dtypes, buffers))
        managed = _attach(session, ground)
        if managed is not None:
            undo.callback(managed.detach)
        if job is not None:
            session.resizing = Resizing(
                ground=ground, job=job, parts=parts, installed=session.installed, buffers=buffers, hooks=hooks
            )
        if source is not None:
            source.prepare(parts.named, store.state, setup.budgets, AllRanks(parts.collectives))
        take_over(parts, source, ground.optimizer)
        if source is not None:
            source.finish()
        undo.pop_all()
    parts.events.session_name = repr(session)
    session.expect_close()
    _log.info(
        "%r: %d chunks of %d elements; %s", session, parts.layout.n_chunks, parts.layout.chunk_numel, setup.budgets
    )
    return session
