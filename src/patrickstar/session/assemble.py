"""Assembly of a session: its memory, the parts that take steps over that, and what both have to do with the model and its optimizer."""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from patrickstar.comm.all_ranks import AllRanks
from patrickstar.comm.collectives import Collectives
from patrickstar.comm.ranks import Ranks
from patrickstar.config.arguments import MemoryOptions
from patrickstar.config.loss_scale import LossScale
from patrickstar.config.problems import refuse
from patrickstar.hooks import watch_root
from patrickstar.memory.filesystem import expect_usable
from patrickstar.memory.links import MakeLane
from patrickstar.optim.choose import choose_kernels
from patrickstar.optim.user_optimizer import check_optimizer
from patrickstar.parameters.bound import names_by_id
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.session.adopt import take_over
from patrickstar.session.alike import expect_alike
from patrickstar.session.buffers import fit_buffers
from patrickstar.session.build_memory import build_memory
from patrickstar.session.build_step import build_step
from patrickstar.session.checks import check_model
from patrickstar.session.close import Closing
from patrickstar.session.loading import Loading
from patrickstar.session.parts import Parts
from patrickstar.session.scaler import LossScaler
from patrickstar.session.session import Session
from patrickstar.session.start import Setup, set_up
from patrickstar.step.budgets import find_resources
from patrickstar.step.precision import model_precision
from patrickstar.step.resources import uncounted_settings
from patrickstar.step.training_deferred import DeferredTraining

_log = logging.getLogger("patrickstar")


def assemble(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    memory: MemoryOptions,
    *,
    make_lane: MakeLane | None = None,
    choice: UpdateChoice = UpdateChoice(),  # noqa: B008  (frozen)
) -> Session:
    """The session for arguments of `manage`, which have been checked.

    Args:
        make_lane: lanes in place of those that the options ask for. choice: when chunks are updated.
    Raises:
        what `manage` raises: model and optimizer are then as before.
    """
    named = check_model(model)
    if optimizer is not None:
        check_optimizer(optimizer, names_by_id(named))
    source = Loading(model, named, memory.weights) if memory.weights is not None else None
    has = find_resources(memory)
    ranks = find_ranks(model, memory, device=has.device)
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
        ranks=ranks,
    )
    uncounted = uncounted_settings(os.environ) if setup.budgets.stream_device is not None else []
    if uncounted:
        _log.warning(
            "PYTORCH_ALLOC_CONF has %s: with that torch gives out larger blocks than plans count, and a step may take more of the device than its "
            "budget before the next is planned with it",
            " and ".join(uncounted),
        )
    store = build_memory(setup, make_lane=make_lane)
    collectives = None if ranks is None else Collectives(ranks, timeout_s=memory.options.collective_timeout)
    try:
        if collectives is not None:
            expect_alike(named, optimizer, setup, collectives)
        parts = build_step(model, named, optimizer, setup, store, choice=choice, collectives=collectives)
        return _begin(parts, optimizer, setup, source)
    except BaseException as error:
        store.close()
        if collectives is not None:
            collectives.close(f"manage() has ended with {type(error).__name__}: {error}")
        raise


def find_ranks(model: nn.Module, memory: MemoryOptions, *, device: str) -> Ranks | None:
    """The ranks of the default process group; None where there is one process. `device`: what computes.

    Raises:
        ConfigError: what is asked for does not go over ranks yet.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    kept = memory.precision or model_precision(model)
    refused = {
        'step="in_backward"': memory.step == "in_backward",
        f'precision="{kept}"': kept != "fp32",
        f'device="{device}"': device != "cpu",
    }
    later = [f"{what} over {dist.get_world_size()} ranks comes later" for what, asked in refused.items() if asked]
    refuse(later, of="manage")
    return Ranks()


def _begin(parts: Parts, original: torch.optim.Optimizer | None, setup: Setup, source: Loading | None) -> Session:
    """The session over its parts: hooks on the model, the optimizer in its place, all values in chunks."""
    model, named, store = parts.model, parts.named, parts.executor.store
    with ExitStack() as undo:  # whatever fails, model and optimizer are as before
        root = watch_root(model, parts.events)
        undo.callback(root.remove)
        blocks = parts.stretches.blocks
        undo.callback(blocks.remove)
        if not parts.whole.why:
            parts.whole.left = blocks.watch
        else:
            blocks.watch()
        dtypes = {name: parameter.dtype for name, parameter in named.items()}
        buffers = fit_buffers(model, setup.precision, setup.budgets.stream_device, undo)
        session = Session(parts, partial(Closing, parts, root, dtypes, buffers))
        if original is not None:
            managed = session.attach(original)
            undo.callback(managed.detach)
            if setup.precision.scales and isinstance(parts.training, DeferredTraining):
                scale = setup.memory.options.loss_scale or LossScale()
                session.scaler = LossScaler(scale, parts.training, managed, original)
        if source is not None:
            source.prepare(named, store.state, setup.budgets, AllRanks(parts.collectives))
        take_over(parts, source, original)
        undo.pop_all()
    if source is not None:
        source.finish()
    parts.events.session_name = repr(session)
    # The store lives as long as anything can use the session: the model, the optimizer, or the session itself.
    unclosed = "%s was never closed: its states are gone. Use `with patrickstar.manage(...) as session:`, or call session.close()"
    session.unclosed = weakref.finalize(store, _log.warning, unclosed, repr(session))
    _log.info(
        "%r: %d chunks of %d elements; %s", session, parts.layout.n_chunks, parts.layout.chunk_numel, setup.budgets
    )
    return session
