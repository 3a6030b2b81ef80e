"""Forecasts: the memory that a training step will take, found without running it: nothing is allocated, and the model may be on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from patrickstar.config.arguments import MemoryOptions, check_arguments
from patrickstar.config.options import Options
from patrickstar.core.formats import Formats, SessionFormats
from patrickstar.core.layout import Layout
from patrickstar.core.machine import Tier
from patrickstar.core.planes import GRAD, WEIGHT, GradientUse, PlaneRef
from patrickstar.core.trace import Phase, Touch, Trace
from patrickstar.deferred.deferred_init import present_and_absent_bytes
from patrickstar.errors import BudgetError, Error
from patrickstar.plan import residency
from patrickstar.plan.fit import advise, worst_moment
from patrickstar.plan.make import make_plan, must_repeat
from patrickstar.plan.pilot import Pilot
from patrickstar.plan.plan import Plan
from patrickstar.plan.residency import Residency
from patrickstar.plan.simulate import simulate
from patrickstar.plan.touches import Touches, UseCounts, gradients_freed, norm_trace, on_tiers, step_trace
from patrickstar.plan.update_choice import UpdateChoice, UpdatePlaces, choose_places, choose_tiers
from patrickstar.plan.weave import weave
from patrickstar.plan.whole_chunks import WholeChunks, update_whole_chunks
from patrickstar.session.smallest import let_gradients_go, smallest_budgets
from patrickstar.session.start import (
    add_gradients,
    gradient_use,
    layout_of,
    resting_state,
    with_pass_bytes,
)
from patrickstar.step.budgets import Budgets, find_budgets, find_resources, with_retention
from patrickstar.step.freed_blocks import KeptBlocks
from patrickstar.step.precision import find_precision
from patrickstar.step.resources import Resources
from patrickstar.tracing.offline import CannotTrace, OfflineTracer

__all__ = ["Forecast", "forecast"]

_STEPS_TO_SETTLE = 12
_TRIES = 4  # of budgets that may be enough


@dataclass(frozen=True, slots=True)
class Forecast:
    """The memory that a training step will take.

    Attributes:
        refused: why not every moment fits, and what budgets are enough; None: it does.
        peak: bytes by tier ("device", "host", "disk"). moved: bytes by link ("H>D", ...) of a step in the long run.
        minimum: the smallest budget of each tier that is used, with the others as they are, or, where that is not enough, as small; 0 where a tier is
            not used. budget: what each tier has.
        parameters, model_data_bytes: elements of all parameters; bytes of weights, gradients and moments.
        plans: of the forward and backward, and of the update, in the long run; empty where it does not fit.
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
    beside_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def fits(self) -> bool:
        """True where every moment fits."""
        return self.refused is None

    @property
    def refusal(self) -> str:
        """The reason why it does not fit, and what would; "" where it does."""
        return "" if self.refused is None else str(self.refused)

    @property
    def plan_text(self) -> str:
        """The plans as readable text."""
        return "\n\n".join(str(plan) for plan in self.plans)


def forecast(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    clip: bool = False,
    choice: UpdateChoice = UpdateChoice(),  # noqa: B008  (frozen)
    has: Resources | None = None,
    **memory_options: Any,
) -> Forecast:
    """The forecast of training `model(**batch)`, with memory options as `manage` takes them.

    Args:
        clip: whether gradients are clipped by hand. has: what the machine has that is to train; None: this one now.

    Raises:
        ConfigError, DeviceError: bad options. Error: the model cannot be traced without running it.
    """
    memory = check_arguments(**memory_options)
    make = partial(_forecast, model, batch, clip=clip, choice=choice, has=has or find_resources(memory))
    found = make(memory)
    return found if found.refused is None else _advised(found, found.refused, memory, make)


def _advised(
    found: Forecast, refused: BudgetError, memory: MemoryOptions, make: Callable[[MemoryOptions], Forecast]
) -> Forecast:
    """The forecast of what does not fit, which names budgets that have been tried out: a refusal knows of its own moment only."""
    enough: dict[str, int] = {}
    tried, refusal = found, refused
    for _ in range(_TRIES):
        tier, before = refusal.tier, enough.get(refusal.tier, 0)
        enough[tier] = tried.minimum[tier] or refusal.smallest_bytes
        if enough[tier] <= before:
            enough[tier] = refusal.smallest_bytes
        if enough[tier] <= before:
            break
        given: dict[str, Any] = {f"{name}_memory": nbytes for name, nbytes in enough.items()}
        tried = make(replace(memory, **given))
        if tried.refused is None:
            refused = advise(refused, enough, more=_full_disk(memory, found.budget))
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
) -> Forecast:
    in_backward = memory.step == "in_backward"
    named = dict(model.named_parameters())
    precision = find_precision(memory, model, has)
    layout = layout_of(model, named, memory, precision, granule_bytes=has.granule_bytes)
    present, absent = present_and_absent_bytes(named.values())
    budgets = find_budgets(memory, weight_bytes=present, absent_bytes=absent, has=has)
    gradients = gradient_use(memory, budgets, precision)
    trainable = {name for name, parameter in named.items() if parameter.requires_grad}
    formats = SessionFormats(precision.formats)
    budgets = with_pass_bytes(budgets, layout, memory, precision)
    tracer = OfflineTracer(
        layout,
        lambda: Touches(
            layout, gradients=gradients, updates=trainable.__contains__, formats=formats, counts=UseCounts()
        ),
        gradients=gradients,
        dtypes=precision.parameter_dtypes(layout),
        copied=precision.copied(layout),
        scales=precision.scales,
        device=budgets.trial_device,
        on_device=budgets.stream_device is not None,
        compute=precision.compute,
    )
    inputs = {name: tensor.to(budgets.trial_device) for name, tensor in batch.items()}
    try:
        step = with_retention(tracer.trace(model, named, (), inputs), budgets)
    except CannotTrace as problem:
        raise Error(f"the model cannot be traced without running it, so there is no forecast: {problem}") from problem
    clips = clip or memory.max_grad_norm is not None
    in_chunks = gradients is GradientUse.CHUNK
    late = _updated_late(step, layout) if in_backward else trainable
    update = _update(
        layout, named, late, precision.formats, in_chunks=in_chunks or in_backward, scratch_bytes=budgets.passes.update
    )
    updates = [update] if late or not in_backward else []
    norms = (
        [norm_trace(layout, trainable, formats=precision.formats, scratch_bytes=budgets.passes.norm)]
        if clips and in_chunks
        else []
    )
    traces = (step, *norms, *updates)
    facts = {
        "parameters": sum(parameter.numel() for parameter in named.values()),
        "model_data_bytes": _model_data_bytes(layout, named, precision.formats, keeps_gradients=not in_backward),
        "layout": layout,
        "traces": traces,
        "beside_bytes": budgets.beside_bytes,
        "workspace_bytes": budgets.machine.costs.set_aside_bytes if budgets.stream_device is not None else 0,
        "budget": {tier.label: budgets.machine.given(tier) for tier in budgets.machine.budget},
    }
    minimum = smallest_budgets(layout, budgets, traces, gradients=gradients, formats=precision.formats)
    try:
        state = resting_state(layout, budgets, gradients=gradients, formats=precision.formats)
        if in_backward:
            add_gradients(state, step, layout=layout, machine=budgets.machine, formats=precision.formats)
        kept = KeptBlocks(budgets)
        whole = None
        if in_backward and not choice.apart:
            places = partial(choose_places, machine=budgets.machine_for(0), peak_bytes=step.peak, choice=choice)
            whole = _whole_chunks(step, state, layout, budgets, formats=precision.formats, choose_places=places)
        if whole is not None:
            state.grow(whole.homes, whole.slots)
            traces = (whole.trace, *traces[1:])
        first, *later = _steps(traces, state, budgets, weaves=in_chunks and not choice.apart, choice=choice)
        frees = gradients_freed if not in_backward else partial(_freed_in, whole)
        peak, moved, plans = _long_run(
            state, layout, budgets, (first, *later), kept, options=memory.options, frees=frees
        )
        facts["traces"] = (*later, first)[0]
    except BudgetError as refusal:
        nothing = {tier.label: 0 for tier in Tier}
        return Forecast(refusal, nothing, {}, minimum, **facts)  # type: ignore[arg-type]
    facts["beside_bytes"] = budgets.beside_bytes + kept.nbytes
    return Forecast(None, peak, moved, minimum, plans=plans, **facts)  # type: ignore[arg-type]


def _whole_chunks(
    step: Trace,
    state: Residency,
    layout: Layout,
    budgets: Budgets,
    *,
    formats: Formats,
    choose_places: Callable[[Trace, Residency], UpdatePlaces],
) -> WholeChunks | None:
    """The forward and backward in which chunks are updated whole; None where all are updated parameter by parameter."""
    machine = budgets.machine_for(worst_moment(step, start=state).nbytes)
    return update_whole_chunks(
        step,
        state=state,
        slots_of_gradient=lambda chunk: residency.slots_of(PlaneRef(chunk, GRAD), layout, formats),
        capacity_bytes=machine.budget[machine.compute],
        choose_places=choose_places,
    )


def _freed_in(whole: WholeChunks | None, trace: Trace) -> tuple[tuple[int, PlaneRef], ...]:
    """The gradients that are let go of in a stretch of a step that updates parameters in its backward."""
    return whole.frees if whole is not None and trace is whole.trace else ()


def _updated_late(step: Trace, layout: Layout) -> set[str]:
    """The parameters whose gradients wait until the backward ends. See Note [Updates in backward]."""
    return {
        layout.owner(moment.label)
        for moment in step.moments
        if any(touch.ref.plane == GRAD for touch in moment.touches)
    }


def _full_disk(memory: MemoryOptions, budget: Mapping[str, int]) -> str:
    """A line to add to a refusal where the disk has a budget of nothing, because nothing is free there."""
    if memory.disk is None or budget[Tier.DISK.label]:
        return ""
    return (
        f"\n  nothing is free in disk={str(memory.disk)!r} (0 bytes): free space there, name a directory on another disk, "
        "or give disk_memory to plan for one"
    )


def _model_data_bytes(
    layout: Layout, named: Mapping[str, nn.Parameter], formats: Formats, *, keeps_gradients: bool
) -> int:
    total = 0
    for name, parameter in named.items():
        planes = formats.at(layout.slices[name].chunk, layout)
        kept = [form.itemsize for plane, form in planes.items() if plane != GRAD or keeps_gradients]
        total += parameter.numel() * sum(kept)
    return total


def _update(
    layout: Layout,
    named: Mapping[str, nn.Parameter],
    trainable: set[str],
    formats: Formats,
    *,
    in_chunks: bool,
    scratch_bytes: int,
) -> Trace:
    trace = step_trace(layout, trainable, formats=formats, in_plane=in_chunks, scratch_bytes=scratch_bytes)
    if in_chunks:
        return trace
    beside = sum(named[name].numel() * 4 for name in trainable)  # gradients, which stay ordinary tensors
    return Trace(tuple(replace(moment, nonmodel_bytes=beside, live_bytes=beside) for moment in trace.moments))


def _steps(
    traces: tuple[Trace, ...], state: Residency, budgets: Budgets, *, weaves: bool, choice: UpdateChoice
) -> list[tuple[Trace, ...]]:
    """The stretches of the first step, and of those after it where these are others: whose forward has the updates of the step before."""
    if not weaves:
        return [traces]
    step, *norms, update = traces
    tiers = choose_tiers(update, state, machine=budgets.machine_for(0), peak_bytes=step.peak, choice=choice)
    update = on_tiers(update, tiers)
    machine = budgets.machine_for(max(worst_moment(trace, start=state).nbytes for trace in (step, update)))
    capacity = machine.budget[machine.compute]
    woven = weave(step, update, state=state, capacity_bytes=capacity, kept_bytes=budgets.fixed_bytes)
    return [(step, *norms), (woven, *norms)]


def _long_run(
    state: Residency,
    layout: Layout,
    budgets: Budgets,
    steps: tuple[tuple[Trace, ...], ...],
    kept: KeptBlocks,
    *,
    options: Options,
    frees: Callable[[Trace], tuple[tuple[int, PlaneRef], ...]],
) -> tuple[dict[str, int], dict[str, int], tuple[Plan, ...]]:
    """Peaks of a run, bytes moved by its last step, and that step's plans, once steps repeat each other.

    Args:
        steps: the stretches of the first step, and of those after it where these are others. kept: learns of each plan.
        frees: the gradients that a stretch lets go of; the others go when an update ends it.
    """
    _fill(state, layout, budgets, options.eviction)
    peak: Counter[str] = Counter()
    starts: list[str] = []
    plans: list[Plan] = []
    moved: Counter[str] = Counter()
    made: Counter[int] = Counter()
    for step in range(_STEPS_TO_SETTLE):
        traces = steps[min(step, len(steps) - 1)]
        plans, moved = [], Counter()
        for number, trace in enumerate(traces):
            following = traces[(number + 1) % len(traces)]
            machine = budgets.machine_for(worst_moment(trace, start=state).nbytes)
            plan = make_plan(
                trace,
                layout=layout,
                machine=machine,
                start=state,
                policy=options.eviction,
                following=following,
                frees=frees(trace),
                prefetch=options.prefetch,
                repeats=must_repeat(made[id(trace)], trace=trace, following=following),
            )
            made[id(trace)] += 1
            simulated = simulate(plan, trace, layout=layout, machine=machine)
            plans.append(plan)
            kept.add(simulated, trace, slot_bytes=state.slot_bytes)
            moved.update(simulated.moved)
            for tier, nbytes in simulated.peak.items():
                peak[tier] = max(peak[tier], nbytes)
            state = Residency.of(plan.end)
            if trace.moments and trace.moments[-1].updates is not None:
                let_gradients_go(state, keeps=number == 0 and len(traces) > 1)
        now = str(state.snapshot())
        if now in starts:
            break
        starts.append(now)
    return dict(peak), dict(moved), tuple(plans)


def _fill(state: Residency, layout: Layout, budgets: Budgets, policy: str) -> None:
    """Weights are put into chunks as `manage` does it."""
    budget_bytes = budgets.machine.budget[state.compute]
    pilot = Pilot(
        state,
        budget_bytes=lambda: budget_bytes,
        host_bytes=budgets.machine.budget.get(Tier.HOST, 0),
        spare_bytes=budgets.spare_bytes,
        policy=policy,
    )
    for run in layout.runs:
        ref = PlaneRef(run.head, WEIGHT)
        for action in pilot.actions(Phase.STEP, run.tensors[0], (Touch(ref, True),), ()):
            residency.apply(state, action)
        residency.mark_written(state, ref)
