"""Assembly of a session, from what it owns up to what its users see."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn

from patrickstar.config.arguments import MemoryOptions
from patrickstar.config.loss_scale import LossScale
from patrickstar.config.options import Options
from patrickstar.core.formats import SessionFormats
from patrickstar.core.layout import Layout
from patrickstar.core.ledger import Ledger
from patrickstar.core.machine import Tier
from patrickstar.core.planes import GradientUse, PlaneRef
from patrickstar.deferred.deferred_init import present_and_absent_bytes
from patrickstar.hooks import watch_root
from patrickstar.memory.arena import Arena
from patrickstar.memory.device_space import DeviceSpace
from patrickstar.memory.disk import DiskPool
from patrickstar.memory.filesystem import expect_usable
from patrickstar.memory.links import Links, MakeLane, lanes_of
from patrickstar.memory.pinned_space import PinnedSpace
from patrickstar.memory.shortages import tell_when_out_of_memory
from patrickstar.memory.space import HostSpace, Space
from patrickstar.memory.store import ChunkStore
from patrickstar.optim.choose import choose_kernels
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.managed import ManagedOptimizer
from patrickstar.optim.passes import Passes
from patrickstar.optim.user_optimizer import check_optimizer, read_groups
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import names_by_id
from patrickstar.parameters.escapes import EscapedMemory
from patrickstar.parameters.whole_calls import WholeCalls
from patrickstar.plan.pilot import Pilot
from patrickstar.plan.residency import Residency
from patrickstar.plan.touches import Touches, UseCounts
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.session.adopt import take_over
from patrickstar.session.buffers import all_buffers, fit_buffers, put_back
from patrickstar.session.checks import check_model
from patrickstar.session.loading import Loading
from patrickstar.session.parts import Parts
from patrickstar.session.scaler import LossScaler
from patrickstar.session.session import Session
from patrickstar.session.start import gradient_use, layout_of, planner_of, resting_state, with_pass_bytes
from patrickstar.step.assembling import Assembling
from patrickstar.step.budgets import Budgets, find_budgets, find_resources
from patrickstar.step.copies import Copies
from patrickstar.step.device_peak import DevicePeak
from patrickstar.step.events import Events
from patrickstar.step.executor import Executor, MeterBound
from patrickstar.step.freed_blocks import FreedBlocks
from patrickstar.step.gradients import Gradients
from patrickstar.step.late_planes import LatePlanes
from patrickstar.step.masters_by_hand import MastersByHand
from patrickstar.step.metering import Metering
from patrickstar.step.out_of_memory import OutOfMemory
from patrickstar.step.precision import Precision, find_precision, torch_type
from patrickstar.step.pressure import Pressure
from patrickstar.step.resources import uncounted_settings
from patrickstar.step.stretches import Stretches
from patrickstar.step.training import Training
from patrickstar.step.update import Updates
from patrickstar.step.values import Weights
from patrickstar.tracing.offline import OfflineTracer
from patrickstar.units import parse_rate

__all__ = ["assemble"]

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
    types = find_precision(memory, model, has)
    layout = layout_of(
        model,
        named,
        memory,
        types,
        granule_bytes=has.granule_bytes,
        trained=lambda parameter: _is_trained(parameter, optimizer),
    )
    present, absent = present_and_absent_bytes(named.values())
    if memory.disk is not None:
        expect_usable(memory.disk)
    budgets = find_budgets(memory, weight_bytes=present, absent_bytes=absent, has=has)
    uncounted = uncounted_settings(os.environ) if budgets.stream_device is not None else []
    if uncounted:
        _log.warning(
            "PYTORCH_ALLOC_CONF has %s: with that torch gives out larger blocks than plans count, and a step may take more of the device than its "
            "budget before the next is planned with it",
            " and ".join(uncounted),
        )
    gradients = gradient_use(memory, budgets, types) if optimizer is not None else GradientUse.NONE
    formats = SessionFormats(types.formats)
    passes = {} if optimizer is None else choose_kernels(budgets.device)  # without an optimizer there are no gradients
    budgets = with_pass_bytes(budgets, layout, memory, types, passes=passes)
    state = resting_state(
        layout, budgets, gradients=gradients, formats=formats.now, clips=memory.max_grad_norm is not None
    )
    store = _build_store(
        state,
        layout,
        memory,
        budgets,
        lambda ref: torch_type(formats.now.of(ref, layout)),
        gradients=gradients,
        make_lane=make_lane or _lanes(memory.options, budgets.stream_device),
    )
    try:
        return _build_session(
            model,
            named,
            optimizer,
            memory=memory,
            layout=layout,
            budgets=budgets,
            gradients=gradients,
            precision=types,
            formats=formats,
            store=store,
            source=source,
            choice=choice,
            passes=passes,
        )
    except BaseException:
        store.close()
        raise


def _lanes(options: Options, device: torch.device | None) -> MakeLane:
    link = options.emulated_link
    rate = None if link is None else parse_rate(link, name="emulated_link")
    return lanes_of(bytes_per_second=rate, stress_seed=options.stress_seed, device=device)


def _space(tier: Tier, device: torch.device | None) -> Callable[..., Space]:
    """The maker of a tier's memory."""
    if device is None:
        return HostSpace
    return partial(DeviceSpace, device=device) if tier is Tier.DEVICE else PinnedSpace


def _is_trained(parameter: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> bool:
    """Tells whether a parameter needs more than its weight: a frozen one does where it has a gradient or moments already."""
    if optimizer is None:
        return False
    return parameter.requires_grad or parameter.grad is not None or parameter in optimizer.state


def _build_store(
    state: Residency,
    layout: Layout,
    memory: MemoryOptions,
    budgets: Budgets,
    dtype_of: Callable[[PlaneRef], torch.dtype],
    *,
    gradients: GradientUse,
    make_lane: MakeLane,
) -> ChunkStore:
    machine = budgets.machine
    # More addresses than slots can ever be in use, all of it fp32 and trained: runs of adjacent free ones are always found.
    chunk_slots = layout.chunk_numel * 4 // state.slot_bytes
    total, longest = 5 * layout.n_chunks * chunk_slots, chunk_slots * max(run.length for run in layout.runs)
    tiers = (machine.compute, Tier.HOST) if machine.compute is Tier.DEVICE else (machine.compute,)
    arenas = {
        tier: Arena(
            state.slot_bytes,
            virtual_slots=2 * total + 8 * longest + 16,
            name=tier.label,
            make_space=_space(tier, budgets.stream_device),
        )
        for tier in tiers
    }
    on_disk = {ref: state.unit_bytes(ref) for ref, tier in state.home.items() if tier is Tier.DISK}
    pool = None
    # Gradients that turn out to have to wait may be all that rests on the disk.
    if on_disk or (gradients is GradientUse.UPDATE and Tier.DISK in machine.budget):
        assert memory.disk is not None, "units were placed on a disk that there is not"
        pool = DiskPool(memory.disk, units=on_disk, budget_bytes=machine.budget[Tier.DISK])
    ledger = Ledger()
    for ref, tier in state.home.items():
        if tier is not machine.compute:
            ledger.add(tier, state.unit_bytes(ref))
    return ChunkStore(
        state,
        arenas=arenas,
        disk=pool,
        links=Links(make_lane),
        dtype=dtype_of,
        chunks=layout.slots,
        ledger=ledger,
        device=budgets.stream_device,
        poison=memory.options.poison,
    )


def _build_session(
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    original: torch.optim.Optimizer | None,
    *,
    memory: MemoryOptions,
    layout: Layout,
    budgets: Budgets,
    gradients: GradientUse,
    precision: Precision,
    formats: SessionFormats,
    store: ChunkStore,
    source: Loading | None,
    choice: UpdateChoice,
    passes: Mapping[str, Passes],
) -> Session:
    machine, options = budgets.machine, memory.options
    compute = machine.compute
    names = names_by_id(named)

    def hypers() -> Mapping[str, Hyper]:
        return {} if original is None else read_groups(original.param_groups, names)

    def in_a_group(name: str) -> bool:
        return original is not None and any(
            named[name] is parameter for group in original.param_groups for parameter in group["params"]
        )

    def make_touches() -> Touches:
        return Touches(layout, gradients=gradients, updates=in_a_group, formats=formats, counts=UseCounts())

    touches = make_touches()
    events = Events(model=model, named=named, touches=touches, compute=precision.compute)
    dtypes = precision.parameter_dtypes(layout)
    binding = Binding(
        named,
        layout,
        events,
        leases=store.leases,
        counts=touches.counts,
        dtypes=dtypes,
        copied=precision.copied(layout),
        gradients=gradients,
        device=budgets.stream_device,
    )
    pilot = Pilot(
        store.state,
        budget_bytes=lambda: machine.budget[compute] - binding.taken_bytes(),
        policy=options.eviction,
        host_bytes=machine.budget[Tier.HOST],
        spare_bytes=budgets.spare_bytes,
        costs=machine.costs,
    )
    device_peak = None if budgets.stream_device is None else DevicePeak(budgets.stream_device)
    executor = Executor(
        pilot,
        store,
        device_peak=device_peak,
        pressure=_pressure(budgets),
        meter_bound=_meter_bound(budgets, set_aside=budgets.spare_bytes + budgets.fixed_bytes),
    )
    late_planes = LatePlanes(
        layout,
        formats,
        executor,
        machine=machine,
        gradients=gradients,
        changed=lambda why: stretches.forget_plans(why),  # noqa: PLW0108  (stretches are made below, with it)
    )
    freed_blocks = FreedBlocks(budgets)
    stretches = Stretches(
        executor=executor,
        planner=planner_of(
            layout,
            budgets,
            gradients=gradients,
            options=options,
            choice=choice,
            slots_of_gradient=late_planes.slots_of_gradient,
            made=lambda plan, trace: freed_blocks.plan(plan, trace, layout),
        ),
        budgets=budgets,
        freed_blocks=freed_blocks,
        tracer=OfflineTracer(
            layout,
            make_touches,
            gradients=gradients,
            dtypes=dtypes,
            copied=precision.copied(layout),
            scales=precision.scales,
            device=budgets.trial_device,
            on_device=budgets.stream_device is not None,
            compute=precision.compute,
        ),
        taken_bytes=binding.taken_bytes,
        metering=Metering(executor, on_device=budgets.stream_device is not None),
        late_planes=late_planes,
        always_meter=compute is Tier.DEVICE and budgets.stream_device is None,
        device_peak=device_peak,
        whole_chunks=gradients is GradientUse.UPDATE and not choice.apart,
        may_weave=lambda: not events.watches and all(isinstance(key, PlaneRef) for key in store.leases.living()),
    )
    weights = Weights(binding, layout, executor, late_planes)
    in_chunks = Gradients(
        layout,
        executor,
        store.dtype,
        late_planes,
        views=binding.assembled,
        passes=passes,
        finds_overflow=precision.scales,
    )
    training = assembling = None
    if original is not None:
        training = Training(
            binding=binding,
            layout=layout,
            executor=executor,
            stretches=stretches,
            gradients=in_chunks,
            updates=Updates(
                layout,
                executor,
                passes,
                binding.stepped,
                formats=formats,
                device=budgets.stream_device,
            ),
            formats=formats,
            touches=touches,
            late_planes=late_planes,
            hypers=hypers,
            max_grad_norm=memory.max_grad_norm,
            is_watched=lambda: events.watches,
            pass_bytes=budgets.passes,
        )
        assembling = Assembling(binding, layout, executor, gradients=in_chunks, weights=weights, steps=training.steps)
    events.connect(
        executor=executor,
        stretches=stretches,
        training=training,
        escaped=_escaped(binding, events, MastersByHand(executor, touches), mixed=precision.mixed),
        copies=Copies(binding, executor, precision, touches),
        late_planes=late_planes,
        assembling=assembling,
        is_managed=binding.is_managed,
    )
    with ExitStack() as undo:  # whatever fails, model and optimizer are as before
        root = watch_root(model, events)
        undo.callback(root.remove)
        whole_calls = WholeCalls(model, binding)
        undo.callback(whole_calls.watched.remove)
        undo.callback(put_back, model, all_buffers(model))
        buffers = fit_buffers(model, precision, budgets.stream_device)
        session = Session(
            Parts(
                model=model,
                named=named,
                layout=layout,
                binding=binding,
                executor=executor,
                stretches=stretches,
                events=events,
                weights=weights,
                training=training,
                root=root,
                whole_calls=whole_calls,
                parameter_dtypes={name: parameter.dtype for name, parameter in named.items()},
                buffers=buffers,
                host_budget_bytes=machine.budget[Tier.HOST] if budgets.host_binds else None,
                shortage=_shortage(executor, stretches, budgets),
            )
        )
        if original is not None:
            managed = ManagedOptimizer(original, target=session, names=names)
            undo.callback(managed.detach)
            if precision.scales and training is not None:
                ours = (managed, original)
                session.scaler = LossScaler(options.loss_scale or LossScale(), training, ours.__contains__)
            session.attach(managed)
        if source is not None:
            source.prepare(named, store.state, budgets)
        take_over(
            named, source, binding=binding, weights=weights, gradients=in_chunks, training=training, optimizer=original
        )
        undo.pop_all()
    if source is not None:
        source.finish()
    binding.session_name = repr(session)
    # The store lives as long as anything can use the session: the model, the optimizer, or the session itself.
    session.unclosed = weakref.finalize(store, _warn_of_unclosed, repr(session))
    _log.info("%r: %d chunks of %d elements; %s", session, layout.n_chunks, layout.chunk_numel, budgets)
    return session


def _pressure(budgets: Budgets) -> Pressure | None:
    """The bound on the process itself, where the host computes and has a bound."""
    machine = budgets.machine
    if not budgets.host_binds or machine.compute is not Tier.HOST:
        return None
    return Pressure(budgets.resident_limit_bytes, machine.budget[machine.compute])


def _meter_bound(budgets: Budgets, *, set_aside: int) -> MeterBound | None:
    """The bound on slots and live bytes, where somebody gave one: a hard bound where a device computes."""
    machine = budgets.machine
    if not budgets.host_binds and machine.compute is Tier.HOST:
        return None
    # On the host an operation's result is there before it is counted: some room is left for that.
    return MeterBound(machine.budget[machine.compute] - set_aside, enforced=machine.compute is Tier.DEVICE)


def _shortage(executor: Executor, stretches: Stretches, budgets: Budgets) -> OutOfMemory | None:
    """An error for a device that has no memory in a step; to be kept for as long as that is wanted."""
    if budgets.stream_device is None:
        return None
    found = OutOfMemory(executor, stretches, budgets)
    tell_when_out_of_memory(budgets.stream_device, found)
    return found


def _escaped(binding: Binding, events: Events, masters_by_hand: MastersByHand, *, mixed: bool) -> EscapedMemory:
    """The watch over memory that was handed out, whose changes by hand are carried into masters that are split."""
    if mixed:
        binding.changes.rewriting = masters_by_hand
    return EscapedMemory(
        binding.lease,
        binding.leases.living,
        events.changed,
        before=lambda key: binding.changes.remember(binding.places.parameters_in(key)),
        after=lambda name, before: masters_by_hand.carry_if_changed(binding.records[name], before),
    )


def _warn_of_unclosed(session: str) -> None:
    _log.warning(
        "%s was never closed: its states are gone. Use `with patrickstar.manage(...) as session:`, or call session.close()",
        session,
    )
