"""The ground of a session, its memory, and the parts that take steps over that: traces, plans, uses, gradients, updates. The model stays as it is.

The memory has homes for every unit, slots on each tier, and the lanes between tiers. It can be built alone, and closed alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from patrickstar.comm.collectives import Collectives
from patrickstar.core.ledger import Ledger
from patrickstar.core.machine import Tier
from patrickstar.core.planes import GradientUse, PlaneRef
from patrickstar.core.shard_layout import ShardLayout
from patrickstar.hooks import watch_root
from patrickstar.memory.arena import Arena
from patrickstar.memory.disk import DiskPool
from patrickstar.memory.space import DeviceSpace, HostSpace, PinnedSpace, Space
from patrickstar.memory.store import ChunkStore
from patrickstar.memory.unit_bytes import UnitBytes
from patrickstar.memory.works_under_way import MakeLane, WorksUnderWay, lanes_of
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.user_optimizer import read_groups
from patrickstar.parallel.group import MeshGroup
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.blocks import Blocks
from patrickstar.parameters.bound import placeholder
from patrickstar.parameters.changes import EscapedMemory
from patrickstar.parameters.exchange import BackwardSums
from patrickstar.parameters.registered import Registered
from patrickstar.plan.fit import of_machine
from patrickstar.plan.pilot import Pilot
from patrickstar.plan.residency import Residency
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.session.mesh_tensors import MeshTensors
from patrickstar.session.parts import Parts, StepBytes
from patrickstar.session.start import Setup, resting_state
from patrickstar.session.step_parts import refuse_outside_of_steps
from patrickstar.step.assembling import Assembling
from patrickstar.step.device_room import DeviceRoom
from patrickstar.step.events import Events
from patrickstar.step.executor import Executor
from patrickstar.step.forwards import FittingBlocks, KnownForwards
from patrickstar.step.gathering import Gathering
from patrickstar.step.gradients import Gradients
from patrickstar.step.late_planes import LatePlanes
from patrickstar.step.optimizer_step import OptimizerStep
from patrickstar.step.precision import torch_type
from patrickstar.step.room import EmulatedRoom, HostRoom
from patrickstar.step.stretches import Stretches
from patrickstar.step.training import Training
from patrickstar.step.training_deferred import DeferredTraining
from patrickstar.step.training_in_backward import InBackwardTraining
from patrickstar.step.values import Weights
from patrickstar.step.weight_masters import Masters
from patrickstar.step.whole import Whole
from patrickstar.torch_private import Plain
from patrickstar.units import format_bytes, parse_rate

MakeMesh = Callable[[Weights], MeshTensors]
"""Makes the whole tensors of a model in blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """All that stays as it is while a session's parts are built, for an elastic job again and again as its ranks come and go.

    Attributes:
        optimizer: whose groups say what is updated; None: weights alone are managed. setup: of an elastic job that of one process, which has all.
        make_lane: lanes in place of those that the options ask for. choice: when chunks are updated.
        groups: those that the model works together with, by mesh dimension. dtypes, strides: of parameters, before they were managed.
    """

    model: nn.Module
    named: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer | None
    setup: Setup
    make_lane: MakeLane | None = None
    choice: UpdateChoice = UpdateChoice()  # noqa: RUF009  (frozen)
    groups: Mapping[str, MeshGroup] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(init=False)
    strides: Mapping[str, Sequence[int]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtypes", {name: parameter.dtype for name, parameter in self.named.items()})
        object.__setattr__(self, "strides", {name: parameter.stride() for name, parameter in self.named.items()})

    @property
    def facts(self) -> str:
        """The model and the optimizer, as far as all ranks must have them alike."""
        groups = [] if self.optimizer is None else [len(group["params"]) for group in self.optimizer.param_groups]
        shapes = sorted((name, tuple(parameter.shape)) for name, parameter in self.named.items())
        digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
        kind = type(self.optimizer).__name__
        return f"{len(shapes)} parameters ({digest}) in chunks of {self.setup.layout.chunk_numel}, {kind} over groups of {groups}"

    def parts(
        self, collectives: Collectives | None, meet: Callable[[Setup], MakeMesh | None] = lambda _: None
    ) -> Parts:
        """Parts without contents, for one process or for one rank of several. Nothing is done to the model. BudgetError, DeviceError: as `manage`.

        `meet`: called once there is memory, before anything stands on it; makes the whole tensors of a model in blocks.
        """
        setup, is_elastic = self.setup, self.setup.ranks is None
        if is_elastic:
            setup = setup.over(None if collectives is None else collectives.ranks)
        store = build_memory(setup, make_lane=self.make_lane)
        try:
            parts = build_step(self, setup, store, collectives=collectives, make_mesh=meet(setup))
        except BaseException:
            store.close()
            raise
        if is_elastic and collectives is not None:
            parts.training.completing = refuse_outside_of_steps
        return parts

    def lay_bare(self) -> None:
        """Leaves parameters without bytes: what stands for them cannot be read."""
        with Plain():
            for parameter in self.named.values():
                parameter.data = placeholder(parameter.dtype, parameter.device).expand(parameter.shape)
                parameter.grad = None


def watch(parts: Parts) -> ExitStack:
    """Hooks that tell parts of calls of the model, and of what its groups send; closing it removes them."""
    with watch_root(parts.model, parts.events) as hooks:
        blocks = parts.stretches.blocks
        hooks.callback(blocks.remove)
        if not parts.whole.why:
            parts.whole.left = blocks.watch
        else:
            blocks.watch()
        if (everyone := parts.everyone) is not None:
            for group in parts.sent.groups.values():
                group.looks.append(everyone.look)
                hooks.callback(group.looks.remove, everyone.look)
        return hooks.pop_all()


def build_memory(setup: Setup, *, make_lane: MakeLane | None = None) -> ChunkStore:
    """The store with every unit at home, without contents yet. BudgetError: no batch could fit. DeviceError: the disk cannot be used.

    Nothing is allocated then. `make_lane`: lanes in place of those that the options ask for.
    """
    memory, layout, budgets, formats = setup.memory, setup.layout, setup.budgets, setup.formats
    machine, options = budgets.machine, memory.options
    state = resting_state(setup, clips=memory.max_grad_norm is not None)
    on_disk = {ref: state.unit_bytes(ref) for ref, tier in state.home.items() if tier is Tier.DISK}
    pool = None
    # What comes later may be all that rests there: gradients that have to wait, or are widened.
    if memory.disk is not None:
        pool = DiskPool(memory.disk, units=on_disk, budget_bytes=machine.budget[Tier.DISK])
    ledger = Ledger()
    for ref, tier in state.home.items():
        if tier is not machine.compute:
            ledger.add(tier, state.unit_bytes(ref))
    rate = None if options.emulated_link is None else parse_rate(options.emulated_link, name="emulated_link")
    lanes = lanes_of(bytes_per_second=rate, stress_seed=options.stress_seed, device=budgets.stream_device)
    units = UnitBytes(
        state=state,
        arenas=_arenas(setup, state),
        disk=pool,
        dtype=lambda ref: torch_type(formats.now.at(ref.chunk, layout)[ref.plane]),
        ledger=ledger,
    )
    device, poison = budgets.stream_device, options.poison
    works = WorksUnderWay(units, make_lane or lanes, chunks=layout.slots, device=device, poison=poison)
    return ChunkStore(units, works)


def _arenas(setup: Setup, state: Residency) -> dict[Tier, Arena]:
    """The arenas of the tier that computes and of the host, by tier."""
    layout, machine = setup.layout, setup.budgets.machine
    # More addresses than slots can ever be in use, all of it fp32 and trained: runs of adjacent free ones are always found.
    chunk_slots = layout.chunk_numel * 4 // state.slot_bytes
    total, longest = 5 * layout.n_chunks * chunk_slots, chunk_slots * max(run.length for run in layout.runs)
    virtual_slots, device = 2 * total + 8 * longest + 16, setup.budgets.stream_device
    spaces: dict[Tier, Callable[..., Space]] = dict.fromkeys(Tier, HostSpace)
    if device is not None:
        spaces = {Tier.DEVICE: partial(DeviceSpace, device=device), Tier.HOST: PinnedSpace}
    return {
        tier: Arena(state.slot_bytes, virtual_slots=virtual_slots, name=tier.label, make_space=spaces[tier])
        for tier in dict.fromkeys((machine.compute, Tier.HOST))
    }


def build_step(
    ground: Ground,
    setup: Setup,
    store: ChunkStore,
    *,
    collectives: Collectives | None = None,
    make_mesh: MakeMesh | None = None,
) -> Parts:
    """The parts of a session over a store, with the ground's setup or one over ranks of an elastic job.

    `collectives`: of the ranks that share the model; None: there is one. `make_mesh`: of a model in blocks.
    """
    model, named, optimizer, choice = ground.model, ground.named, ground.optimizer, ground.choice
    layout, budgets, gradients, precision = setup.layout, setup.budgets, setup.gradients, setup.precision
    formats, memory, machine = setup.formats, setup.memory, budgets.machine

    def groups() -> list[dict[str, Any]]:
        return [] if optimizer is None else optimizer.param_groups

    def hypers() -> Mapping[str, Hyper]:
        return read_groups(groups(), binding.names, lr_factor=training.lr_factor)

    def in_a_group(name: str) -> bool:
        return any(named[name] is parameter for group in groups() for parameter in group["params"])

    touches, passes = setup.touches(in_a_group), setup.passes or {}
    pilot = Pilot(
        store.state,
        budget_bytes=lambda: machine.budget[machine.compute] - binding.taken_bytes(),
        policy=memory.options.eviction,
        host_bytes=machine.budget[Tier.HOST],
        spare_bytes=budgets.spare_bytes,
        costs=machine.costs,
    )
    on_device = DeviceRoom if budgets.stream_device is not None else EmulatedRoom
    room = (on_device if machine.compute is Tier.DEVICE else HostRoom)(pilot, store, budgets)
    executor = Executor(pilot, store, room)
    events = Events(
        registered=Registered(model), named=named, touches=touches, executor=executor, compute=precision.compute
    )
    masters = Masters(executor, touches, precision.rounding)
    gathering = None
    if collectives is not None:
        assert isinstance(layout, ShardLayout)
        gathering = Gathering(
            layout, named, executor=executor, collectives=collectives, masters=masters, travel=precision.travel
        )
        events.order = gathering.order
    binding = Binding(
        named,
        events,
        leases=store.leases,
        touches=touches,
        dtypes=precision.parameter_dtypes(layout),
        copied=precision.copied(layout),
        device=budgets.stream_device,
        whole=not setup.by_use,
        to_master=masters.carry if precision.mixed else None,
        strides=ground.strides,
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
        executor=executor,
        kept_in=setup.kept_gradients,
        sizes=setup.sizes,
        budgets=budgets,
        why=setup.by_use,
    )
    planner, places = setup.planner(choice, room.planned), setup.places(model, binding.names)
    fitting = FittingBlocks(
        model=model,
        named=named,
        tracer=replace(setup.tracer(in_a_group), next_blocks={} if gathering is None else gathering.order.next_blocks),
        budgets=budgets,
        places=places,
        start=late_planes.with_room_for,
        taken_bytes=binding.taken_bytes,
    )
    handed_out = EscapedMemory(binding.access, binding.changes)
    in_backward = gradients is GradientUse.UPDATE
    stretches = Stretches(
        executor=executor,
        planner=planner,
        budgets=budgets,
        known=KnownForwards(fitting, late_planes, room, whole, keeps_inputs=precision.travel.in_parts),
        blocks=Blocks(model, binding, events.order),
        whole=whole,
        late_planes=late_planes,
        whole_chunks=in_backward and not choice.apart,
        may_weave=lambda: not handed_out.watched and all(isinstance(key, PlaneRef) for key in store.leases.living()),
    )
    weights = Weights(binding, layout, executor, late_planes, gathering)
    mesh = None if make_mesh is None else make_mesh(weights)
    in_chunks = Gradients(
        layout,
        executor,
        store.units.dtype,
        late_planes,
        views=binding.assembled,
        passes=passes,
        finds_overflow=precision.scales,
        gathering=gathering,
    )
    shared: dict[str, Any] = {"binding": binding, "layout": layout, "executor": executor, "stretches": stretches}
    shared |= {"in_chunks": in_chunks, "whole": whole}
    sums = BackwardSums() if gathering is None else gathering.came
    updates = OptimizerStep(planner=planner, passes=passes, **shared)
    shared |= {"updates": updates, "touches": touches, "hypers": hypers, "gathering": gathering, "sums": sums}
    training: Training = (
        InBackwardTraining(handed_out=handed_out, **shared)
        if in_backward
        else DeferredTraining(max_grad_norm=memory.max_grad_norm, mesh=None if mesh is None else mesh.ranks, **shared)
    )
    # In a backward those that were used are told from none.
    binding.gradients.are_kept = lambda: in_backward or bool(in_chunks.names)
    events.binding, events.whole, events.late_planes, events.stretches = binding, whole, late_planes, stretches
    events.training, events.handed_out = training, handed_out
    events.masters, masters.binding = gathering or masters, binding
    if gathering is not None:
        gathering.binding, gathering.take = binding, in_chunks.add_shares
        binding.kept_bytes, binding.gradients.are_shared = gathering.kept_bytes, True
        events.refused = gathering.refused
    elif mesh is not None:
        local_size = mesh.ranks.collectives.ranks.local_size
        events.refused = lambda refusal: of_machine(refusal, refusal.smallest_bytes, local_size)
    events.assembling = Assembling(binding, layout, executor, gradients=in_chunks, weights=weights, steps=updates.steps)
    events.outside = next((named[name] for name in named if all(name not in place.names for place in places)), None)
    events.advice = lambda: (
        ""
        if setup.never_whole
        else f"; or give a budget of {format_bytes(whole.needed_bytes)} or more, in which all model states fit: parameters are ordinary ones then"
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
        training=training,
        whole=whole,
        collectives=collectives,
        mesh=mesh,
        sent=StepBytes(ground.groups, collectives),
        host_budget_bytes=machine.budget[Tier.HOST] if budgets.host_binds else None,
    )
