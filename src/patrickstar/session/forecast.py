"""Forecasts: the memory that a training step will take, found without running it: nothing is allocated, and the model may be on the meta device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from patrickstar.config.arguments import MemoryOptions, check_arguments
from patrickstar.core.formats import Formats
from patrickstar.core.layout import Layout
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, REST, WEIGHT
from patrickstar.core.shard_layout import RankOf, ShardLayout, shard_of
from patrickstar.core.trace import Trace
from patrickstar.errors import BudgetError, Error
from patrickstar.memory.allocator import allocator
from patrickstar.parameters.bound import names_by_id
from patrickstar.plan import residency
from patrickstar.plan.fit import advise, expect_room, minimum_bytes, worst_moment
from patrickstar.plan.placement import place, place_on_all_tiers
from patrickstar.plan.plan import Plan
from patrickstar.plan.residency import Residency
from patrickstar.plan.simulate import Simulation
from patrickstar.plan.touches import kept_gradients
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.session.paper_run import PaperRun
from patrickstar.session.start import Setup, add_gradients, resting_state, set_up
from patrickstar.step.budgets import Budgets, find_resources, leaves_room
from patrickstar.step.forwards import FittingBlocks
from patrickstar.step.resources import Resources
from patrickstar.step.room import EARLY_BYTES
from patrickstar.tracing.offline import Foreseen
from patrickstar.tracing.twin import CannotTrace
from patrickstar.units import MIB

_TRIES = 4  # of budgets that may be enough
_HOST_TRIES = 6  # of the smallest budget of a host below a device
_GRAIN_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class Forecast:
    """The memory that a training step will take.

    Attributes:
        refused: why not every moment fits, and what budgets are enough; None: it does.
        peak: bytes by tier ("device", "host", "disk"). moved: bytes by link ("H>D", ...) of a step in the long run; over ranks, "ranks": what this
            one sends to others for weights and gradients. All of one rank.
        minimum: the smallest budget of each tier that is used, with the others as they are, or, where that is not enough, as small; 0 where a tier is
            not used. budget: what each tier has. Over ranks both are as budgets are given: of host and disk, what the ranks of a machine share.
        by_rank: bytes of model states that each rank has; empty where there is one.
        parameters, model_data_bytes: elements of all parameters; bytes of weights, gradients and moments.
        plans: of a step in the long run, in order; empty where it does not fit. first_plans: of the first step. traces: of the plans.
        layout: which parameter lies in which chunk. beside_bytes: what the process takes beside the peak of the host, where `host_memory` bounds it
            and the host computes: fixed costs, and freed blocks where there is room to keep them. workspace_bytes: of the device's budget, left for
            workspaces of kernels.
    """

    refused: BudgetError | None
    peak: Mapping[str, int]
    moved: Mapping[str, int]
    minimum: Mapping[str, int]
    budget: Mapping[str, int]
    parameters: int
    model_data_bytes: int
    layout: Layout
    traces: tuple[Trace, ...] = ()
    plans: tuple[Plan, ...] = field(default=(), repr=False)
    first_plans: tuple[Plan, ...] = field(default=(), repr=False)
    beside_bytes: int = 0
    workspace_bytes: int = 0
    by_rank: tuple[int, ...] = ()

    @property
    def fits(self) -> bool:
        """True where every moment fits."""
        return self.refused is None

    @property
    def refusal(self) -> str:
        """The reason why it does not fit, and what would; "" where it does."""
        return "" if self.refused is None else str(self.refused)


def forecast(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    clip: bool = False,
    choice: UpdateChoice = UpdateChoice(),  # noqa: B008  (frozen)
    has: Resources | None = None,
    which: RankOf | None = None,
    advises: bool = True,
    **memory_options: Any,
) -> Forecast:
    """The forecast of training `model(**batch)`, with memory options as `manage` takes them.

    Args:
        clip: whether gradients are clipped by hand. has: what the machine has that is to train; None: this one now.
        which: the rank whose step it is, and whose batch; None: there is one process.
        advises: whether budgets are tried out for a refusal to name; each is a forecast more.

    Raises:
        ConfigError, DeviceError: bad options. Error: the model cannot be traced without running it.
    """
    memory = check_arguments(**memory_options)
    has = has or find_resources(memory)
    make = partial(_forecast, model, batch, clip=clip, choice=choice, has=has, which=which, traced={})
    found = make(memory)
    return found if found.refused is None or not advises else _advised(found, found.refused, memory, make, which)


def _advised(
    found: Forecast,
    refused: BudgetError,
    memory: MemoryOptions,
    make: Callable[[MemoryOptions], Forecast],
    which: RankOf | None,
) -> Forecast:
    """The forecast of what does not fit, which names budgets that have been tried out: a refusal knows of its own moment only."""
    enough: dict[str, int] = {}
    more = _full_disk(memory, found.budget)
    if which is not None:
        more += f"\n  op, need and budget are of one rank; what fits is for the {which.local_size} ranks of a machine"
    tried, refusal = found, refused
    for _ in range(_TRIES):
        tier, before = refusal.tier, enough.get(refusal.tier, 0)
        smallest = _given(tier, refusal.smallest_bytes, which)
        enough[tier] = tried.minimum[tier] or smallest
        if enough[tier] <= before:
            enough[tier] = smallest
        if enough[tier] <= before:
            break
        given: dict[str, Any] = {f"{name}_memory": nbytes for name, nbytes in enough.items()}
        tried = make(replace(memory, **given))
        if tried.refused is None:
            refused = advise(refused, enough, more=more)
            return replace(found, refused=refused, minimum={**found.minimum, **enough})
        refusal = tried.refused
    return found


def _forecast(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    memory: MemoryOptions,
    *,
    clip: bool,
    choice: UpdateChoice,
    has: Resources,
    which: RankOf | None,
    traced: dict[frozenset[str], Foreseen],
) -> Forecast:
    """One forecast. `traced`: what the forward does with these blocks bound, whatever the budgets are."""
    in_backward = memory.step == "in_backward"
    named = dict(model.named_parameters())
    shares = None if which is None or which.size == 1 else which
    setup = set_up(model, named, memory, has, ranks=shares, everyone=which)
    layout, budgets, formats = setup.layout, setup.budgets, setup.formats
    tracer = setup.tracer(lambda name: named[name].requires_grad)
    inputs = {
        name: value.to(budgets.trial_device) if isinstance(value, Tensor) else value for name, value in batch.items()
    }

    def start(trace: Trace) -> Residency:
        state = resting_state(setup)
        add_gradients(state, trace, setup, budgets.machine)
        return state

    places = setup.places(model, names_by_id(named))
    fitting = FittingBlocks(
        model=model, named=named, tracer=tracer, budgets=budgets, places=places, start=start, traced=traced
    )
    try:
        try:
            foreseen = fitting.foresee_in((), (), inputs)
        except CannotTrace:  # by use; what blocks do may show all the same
            foreseen = fitting.foresee_in([place.path for place in places], (), inputs)
    except CannotTrace as problem:
        raise Error(f"the model cannot be traced without running it, so there is no forecast: {problem}") from problem
    step = foreseen.trace
    whole_gradients = _whole_gradients(setup, foreseen)
    takes_norm = (clip or memory.max_grad_norm is not None) and not in_backward
    planner = setup.planner(choice)

    def traces_of(step: Trace) -> tuple[Trace, ...]:
        waiting = kept_gradients(step, layout)
        norm = [planner.norm_trace(waiting)] if takes_norm else []
        return (step, *norm, *([planner.update_trace(waiting)] if waiting or not in_backward else []))

    traces = traces_of(step)
    whole = layout.whole if isinstance(layout, ShardLayout) else layout
    shards = [whole] if shares is None else [shard_of(whole, rank, shares.size) for rank in range(shares.size)]
    states = partial(_model_data_bytes, formats=formats.now, keeps_gradients=not in_backward)
    by_rank = tuple(map(states, shards))
    found = Forecast(
        None,
        {tier.label: 0 for tier in Tier},
        {},
        {tier: _given(tier, nbytes, which) for tier, nbytes in smallest_budgets(setup, traces).items()},
        budget={tier.label: _given(tier.label, budgets.machine.given(tier), which) for tier in budgets.machine.budget},
        parameters=sum(parameter.numel() for parameter in named.values()),
        model_data_bytes=sum(by_rank),
        by_rank=by_rank if shares is not None else (),
        layout=layout,
        traces=traces,
        beside_bytes=budgets.beside_bytes,
        workspace_bytes=budgets.machine.costs.set_aside_bytes if budgets.stream_device is not None else 0,
    )
    try:
        if whole_gradients is None:
            foreseen = fitting.foresee((), inputs, in_blocks=True)[0]
            step = foreseen.trace
            found = replace(found, traces=traces_of(step))
        state = start(step)
        need = worst_moment(step, start=state, trained=True)
        expect_room(need, budgets.machine_for(need.nbytes))
        run = PaperRun(
            planner=planner,
            state=state,
            budgets=budgets,
            forward=step,
            clips=takes_norm,
            in_backward=in_backward,
            gradient_bytes=whole_gradients,
        )
        first, last = run.settle()
    except BudgetError as refusal:
        return replace(found, refused=refusal)
    return replace(
        found,
        peak=dict(run.peak),
        moved={**last.moved, "ranks": foreseen.sent_bytes},
        traces=tuple(last.traces),
        plans=tuple(last.plans),
        first_plans=tuple(first.plans),
        beside_bytes=found.beside_bytes + _kept_bytes(budgets, run.ran, slot_bytes=state.slot_bytes),
    )


def _whole_gradients(setup: Setup, foreseen: Foreseen) -> int | None:
    """Bytes of gradients that no trace has, where parameters keep their bytes in such a step; None where they are bound by use."""
    state_bytes, gradient_bytes = setup.sizes(setup.kept_gradients(None if foreseen.by_chance else foreseen.trace))
    if setup.by_use or foreseen.by_use or not setup.budgets.hold(state_bytes, foreseen.trace.peak):
        return None
    return gradient_bytes


def _kept_bytes(budgets: Budgets, ran: Sequence[tuple[Simulation, Trace]], *, slot_bytes: int) -> int:
    """Bytes that the process is to take beyond the peak of these plans, carried out on paper, because freed blocks are kept.

    As the allocator comes, or up to where it is asked for what it keeps.
    """
    found, tier = allocator(), budgets.machine.compute
    if not budgets.host_binds or tier is not Tier.HOST:
        return 0
    if not all(leaves_room(simulated, trace, budgets, found) for simulated, trace in ran):
        return 0
    slots = max(max(simulated.slots, default=0) for simulated, _ in ran) * slot_bytes
    as_it_comes = slots + int(max(trace.peak for _, trace in ran) * found.retains)
    peak = max(simulated.peak[tier.label] for simulated, _ in ran)
    return max(0, min(as_it_comes, budgets.machine.budget[tier] + EARLY_BYTES) - peak)


def _full_disk(memory: MemoryOptions, budget: Mapping[str, int]) -> str:
    """A line to add to a refusal where the disk has a budget of nothing, because nothing is free there."""
    if memory.disk is None or budget[Tier.DISK.label]:
        return ""
    return (
        f"\n  nothing is free in disk={str(memory.disk)!r} (0 bytes): free space there, name a directory on another disk, "
        "or give disk_memory to plan for one"
    )


def _given(tier: str, nbytes: int, which: RankOf | None) -> int:
    """A budget as it is given, for one of which a rank has so much: ranks of a machine share its host and its disk."""
    return nbytes * (which.local_size if which is not None and tier != Tier.DEVICE.label else 1)


def _model_data_bytes(layout: Layout, *, formats: Formats, keeps_gradients: bool) -> int:
    total = 0
    for name, piece in layout.slices.items():
        planes = formats.at(piece.chunk, layout)
        kept = [form.itemsize for plane, form in planes.items() if plane != GRAD or keeps_gradients]
        total += sum(part.stop - part.start for part in layout.parts(name)) * sum(kept)
    return total


def smallest_budgets(setup: Setup, traces: tuple[Trace, ...]) -> dict[str, int]:
    """The smallest budget of the compute tier when everything may rest below it, or on it where there is nothing below.

    Where the tiers below a device have no room for all, those of the device and of the host, each with the other as it is; the device's with the
    smallest host, or one that holds everything, where they have no room whatever rests on the device.
    """
    machine, layout, formats = setup.budgets.machine, setup.layout, setup.formats.now
    minimum = {tier.label: 0 for tier in Tier}
    if machine.compute is Tier.DEVICE and not _rests_below(setup):
        needs = partial(_needed_beside_homes, setup, traces)
        units = formats.units(layout, (WEIGHT, REST, EXP_AVG, EXP_AVG_SQ, GRAD))
        slots = sum(residency.slots_of(ref, layout, formats) for ref in units)
        everything = slots * residency.bytes_of_slot(layout, formats)
        minimum[Tier.HOST.label] = enough = _smallest_host(machine, needs, everything)
        try:
            needed = needs(machine)
        except BudgetError:
            needed = needs(_with_host(machine, enough or everything))
    elif machine.compute is Tier.HOST and Tier.DISK not in machine.budget:
        needed = _needed_beside_homes(setup, traces, machine)
    else:
        needed = minimum_bytes(*traces, layout=layout, formats=formats)
    minimum[machine.compute.label] = needed + machine.costs.beside(needed)
    return minimum


def _rests_below(setup: Setup) -> bool:
    """Tells whether everything finds room below the device."""
    machine, planes = setup.budgets.machine, setup.gradients.planes
    whole = machine.budget[machine.compute]
    with suppress(BudgetError):
        place(setup.layout, machine, planes=planes, nonmodel_bytes=whole, formats=setup.formats.now)
        return True
    return False


def _needed_beside_homes(setup: Setup, traces: tuple[Trace, ...], machine: Machine) -> int:
    """The smallest budget of the compute tier where what the tiers below have no room for is at home there."""
    layout, formats, compute = setup.layout, setup.formats.now, machine.compute
    roomy = Machine(compute, {**machine.budget, compute: sys.maxsize})
    home = place_on_all_tiers(layout, roomy, planes=setup.gradients.planes, formats=formats)
    contents = Residency.at_rest(layout, compute=compute, home=home, free=home, formats=formats)
    add_gradients(contents, traces[0], setup, roomy)
    at_home = sum(contents.unit_bytes(ref) for ref, tier in contents.home.items() if tier is compute)
    # By a step after others, where what is at home there never leaves it.
    return max(at_home, *(worst_moment(trace, start=contents, trained=True).nbytes for trace in traces))


def _smallest_host(machine: Machine, needs: Callable[[Machine], int], everything: int) -> int:
    """The smallest budget of the host with which the device's is enough, or little more than that; 0: none is, with `everything` on the host."""
    device_bytes = machine.budget[Tier.DEVICE]
    if needs(_with_host(machine, everything)) > device_bytes:
        return 0
    host_bytes, best = machine.budget[Tier.HOST], everything
    for _ in range(_HOST_TRIES):
        try:
            short = needs(_with_host(machine, host_bytes)) - device_bytes
        except BudgetError as refusal:  # of the tiers below, whatever the device has
            host_bytes += refusal.smallest_bytes - refusal.available_bytes
            if host_bytes >= best:
                break
            continue
        if short <= 0:
            best = min(best, host_bytes)
            if short > -_GRAIN_BYTES:
                break
        # Where anything rests on the device at all, a byte more of the host is a byte less there.
        more = short + _GRAIN_BYTES // 2 if short > 0 else short
        host_bytes = min(max(host_bytes + more, 1), best)
    return best


def _with_host(machine: Machine, host_bytes: int) -> Machine:
    return Machine(machine.compute, {**machine.budget, Tier.HOST: host_bytes})
