"""The parts of a session that take steps, over a memory that is built already: traces, plans, uses, gradients, updates. The model stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar.core.machine import Tier
from patrickstar.core.planes import GradientUse, PlaneRef
from patrickstar.memory.shortages import tell_when_out_of_memory
from patrickstar.memory.store import ChunkStore
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.user_optimizer import read_groups
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.blocks import Blocks
from patrickstar.parameters.escapes import EscapedMemory
from patrickstar.parameters.registered import Registered
from patrickstar.plan.pilot import Pilot
from patrickstar.plan.planner import Planner
from patrickstar.plan.touches import Touches
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.session.parts import Parts
from patrickstar.session.start import Setup
from patrickstar.step.assembling import Assembling
from patrickstar.step.budgets import Budgets
from patrickstar.step.copies import Copies
from patrickstar.step.events import Events, Neighbours
from patrickstar.step.executor import Executor
from patrickstar.step.fitting_blocks import FittingBlocks
from patrickstar.step.gradients import Gradients
from patrickstar.step.late_planes import LatePlanes
from patrickstar.step.masters_by_hand import MastersByHand
from patrickstar.step.optimizer_step import OptimizerStep
from patrickstar.step.out_of_memory import OutOfMemory
from patrickstar.step.room import DeviceRoom, Room, room_of
from patrickstar.step.stretches import Stretches
from patrickstar.step.training import Training
from patrickstar.step.training_deferred import DeferredTraining
from patrickstar.step.training_in_backward import InBackwardTraining
from patrickstar.step.values import Weights
from patrickstar.step.whole import Whole
from patrickstar.units import format_bytes


def build_step(
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    setup: Setup,
    store: ChunkStore,
    *,
    choice: UpdateChoice = UpdateChoice(),  # noqa: B008  (frozen)
) -> Parts:
    """The parts of a session over a store.

    Args:
        optimizer: whose groups say what is updated; None: weights alone are managed. choice: when chunks are updated.
    """
    layout, budgets, gradients, precision = setup.layout, setup.budgets, setup.gradients, setup.precision
    formats, memory, machine = setup.formats, setup.memory, budgets.machine

    def groups() -> list[dict[str, Any]]:
        return [] if optimizer is None else optimizer.param_groups

    def hypers() -> Mapping[str, Hyper]:
        return read_groups(groups(), binding.names)

    def in_a_group(name: str) -> bool:
        return any(named[name] is parameter for group in groups() for parameter in group["params"])

    touches = setup.touches(in_a_group)
    events = Events(registered=Registered(model), named=named, touches=touches, compute=precision.compute)
    pilot = Pilot(
        store.state,
        budget_bytes=lambda: machine.budget[machine.compute] - binding.taken_bytes(),
        policy=memory.options.eviction,
        host_bytes=machine.budget[Tier.HOST],
        spare_bytes=budgets.spare_bytes,
        costs=machine.costs,
    )
    room = room_of(pilot, store, budgets)
    executor = Executor(pilot, store, room)
    masters_by_hand = MastersByHand(executor, touches)
    binding = Binding(
        named,
        layout,
        events,
        leases=store.leases,
        counts=touches.counts,
        dtypes=precision.parameter_dtypes(layout),
        copied=precision.copied(layout),
        gradients=gradients,
        device=budgets.stream_device,
        whole=not setup.by_use,
        rewriting=masters_by_hand if precision.mixed else None,
    )
    late_planes = LatePlanes(
        layout,
        formats,
        executor,
        machine=machine,
        gradients=gradients,
        changed=lambda why: stretches.forget_plans(why),  # noqa: PLW0108  (stretches are made below, with it)
    )
    whole = Whole(
        binding=binding,
        layout=layout,
        executor=executor,
        late_planes=late_planes,
        passes=setup.passes or {},
        kept_in=setup.kept_gradients,
        sizes=setup.sizes,
        budgets=budgets,
        why=setup.by_use,
    )
    planner, places = setup.planner(choice, room.planned), setup.places(model, binding.names)
    stretches = Stretches(
        executor=executor,
        planner=planner,
        budgets=budgets,
        fitting=FittingBlocks(
            tracer=setup.tracer(in_a_group),
            budgets=budgets,
            places=places,
            start=late_planes.with_room_for,
            taken_bytes=binding.taken_bytes,
        ),
        blocks=Blocks(model, binding),
        taken_bytes=binding.taken_bytes,
        late_planes=late_planes,
        whole_chunks=gradients is GradientUse.UPDATE and not choice.apart,
        whole=whole,
        may_weave=lambda: (
            not events.to.escaped.watched and all(isinstance(key, PlaneRef) for key in store.leases.living())
        ),
    )
    weights = Weights(binding, layout, executor, late_planes)
    in_chunks = Gradients(
        layout,
        executor,
        store.units.dtype,
        late_planes,
        views=binding.assembled,
        passes=setup.passes or {},
        finds_overflow=precision.scales,
    )
    training = None
    if optimizer is not None:
        training = _build_training(
            setup,
            planner=planner,
            is_watched=lambda: bool(events.to.escaped.watched),
            late_planes=late_planes,
            whole=whole,
            touches=touches,
            hypers=hypers,
            binding=binding,
            layout=layout,
            executor=executor,
            stretches=stretches,
            in_chunks=in_chunks,
        )
    in_backward = setup.gradients is GradientUse.UPDATE  # where those that were used are told from none
    binding.gradients.are_kept = lambda: in_backward or bool(in_chunks.names)
    steps = {} if training is None else training.steps
    events.to = Neighbours(
        executor=executor,
        stretches=stretches,
        training=training,
        escaped=EscapedMemory(binding.access, binding.changes, masters_by_hand.carry_if_changed),
        copies=Copies(binding, executor, precision, touches),
        late_planes=late_planes,
        assembling=Assembling(binding, layout, executor, gradients=in_chunks, weights=weights, steps=steps),
        is_managed=binding.is_managed,
        are_managed=binding.are_managed,
        take_back=lambda **how: binding.whole.take_back(**how) if binding.is_whole else None,
        is_whole=lambda: not whole.why,
        close_block=binding.access.close,
        advice=lambda: (
            ""
            if setup.never_whole
            else f"; or give a budget of {format_bytes(whole.needed_bytes)} or more, in which all model states fit: parameters are ordinary ones then"
        ),
        outside=next((named[name] for name in named if all(name not in place.names for place in places)), None),
    )
    return Parts(
        model=model,
        named=named,
        layout=layout,
        binding=binding,
        executor=executor,
        stretches=stretches,
        events=events,
        weights=weights,
        gradients=in_chunks,
        training=training,
        whole=whole,
        host_budget_bytes=machine.budget[Tier.HOST] if budgets.host_binds else None,
        shortage=_shortage(executor, room, budgets),
    )


def _build_training(
    setup: Setup,
    *,
    planner: Planner,
    is_watched: Callable[[], bool],
    late_planes: LatePlanes,
    whole: Whole,
    touches: Touches,
    hypers: Callable[[], Mapping[str, Hyper]],
    **parts: Any,
) -> Training:
    """Training in the mode in which gradients are used. `parts`: that training has in common with the optimizer's step."""
    passes, memory = setup.passes or {}, setup.memory
    parts["updates"] = OptimizerStep(planner=planner, passes=passes, whole=whole, **parts)
    parts |= {"touches": touches, "hypers": hypers}
    if setup.gradients is GradientUse.UPDATE:
        return InBackwardTraining(is_watched=is_watched, whole=whole, **parts)
    return DeferredTraining(
        late_planes=late_planes, passes=passes, max_grad_norm=memory.max_grad_norm, whole=whole, **parts
    )


def _shortage(executor: Executor, room: Room, budgets: Budgets) -> OutOfMemory | None:
    """An error for a device that has no memory in a step; to be kept for as long as that is wanted."""
    if not isinstance(room, DeviceRoom):
        return None
    found = OutOfMemory(executor, room, budgets)
    tell_when_out_of_memory(budgets.device, found)
    return found
