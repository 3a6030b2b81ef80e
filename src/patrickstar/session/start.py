"""Layout and homes before the first step: where everything lies and rests."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from patrickstar.comm.ranks import Ranks
from patrickstar.config.arguments import MemoryOptions
from patrickstar.core.chunk_size import GRAIN, search_chunk_numel, whole_grains
from patrickstar.core.cuda_blocks import block_bytes
from patrickstar.core.formats import SessionFormats
from patrickstar.core.layout import Layout, TensorSpec, build_layout
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import GRAD, WEIGHT, GradientUse, PlaneRef
from patrickstar.core.shard_layout import RankOf, ShardLayout, shard_of
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.deferred.deferred_init import present_and_absent_bytes
from patrickstar.errors import BudgetError, LayoutError
from patrickstar.optim.norm import SharedNorm
from patrickstar.optim.passes import Passes, triton_bytes
from patrickstar.parameters.blocks import Place, places_in
from patrickstar.parameters.bound import names_by_id
from patrickstar.parameters.tiles import NOT_ONE_TENSOR
from patrickstar.plan.fit import expect_room, name_gradients, worst_moment
from patrickstar.plan.placement import place, place_gradients, place_on_all_tiers
from patrickstar.plan.plan import Plan
from patrickstar.plan.planner import Planner
from patrickstar.plan.residency import Residency, bytes_of_slot, slots_of
from patrickstar.plan.touches import Touches, kept_gradients, norm_trace, step_trace
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.step.budgets import Budgets, find_budgets
from patrickstar.step.overflow import overflow_bytes
from patrickstar.step.precision import Precision, find_precision, lies_in
from patrickstar.step.resources import Resources
from patrickstar.tracing.offline import OfflineTracer
from patrickstar.units import format_bytes

BindingKind = Literal["whole", "blocks", "use"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The ground of a session, and of a forecast of one, before anything is allocated: types, layout, budgets.

    Attributes:
        memory: the options of `manage`. formats: planes and their types, as they are now.
        gradients: where these go. binding: how parameters are bound at most. passes: over planes, by type of device; None: those of a GPU, on paper.
        has_gradients: whether some parameter has one already.
    """

    memory: MemoryOptions
    precision: Precision
    layout: Layout
    budgets: Budgets
    gradients: GradientUse
    formats: SessionFormats
    passes: Mapping[str, Passes] | None
    binding: BindingKind = "whole"
    has_gradients: bool = False
    ranks: Ranks | RankOf | None = None

    @property
    def by_use(self) -> str:
        """The reason why parameters are bound by use; empty where they keep their bytes for the whole session. See Note [Whole] in the binding."""
        least, _ = self.sizes(self.kept_gradients(Trace(())))
        if self.never_whole or self.budgets.hold(least, self.budgets.passes.update):
            return self.never_whole
        return f"{format_bytes(least)} of model states do not fit in {format_bytes(self.budgets.room_bytes())}"

    @property
    def never_whole(self) -> str:
        """The reason why parameters are bound by use whatever the budget; empty where there is none."""
        if self.ranks is not None:
            return "ranks share all model states"
        if self.binding != "whole":
            return "asked for"
        if self.has_gradients and self.precision.mixed and self.gradients is GradientUse.UPDATE:
            return "gradients of 16 bits from before manage()"
        return "" if self.memory.options.tile_rows is None else "Options(tile_rows=)"

    def over(self, ranks: Ranks | RankOf | None) -> Setup:
        """A setup for one of these ranks, of which each has its share of chunks; None: for one process, which has all."""
        layout = self.layout if ranks is None else shard_of(self.layout, ranks.rank, ranks.size)
        return replace(self, layout=layout, ranks=ranks, formats=SessionFormats(self.precision.formats))

    def kept_gradients(self, trace: Trace | None) -> frozenset[str]:
        """The parameters whose gradients are kept beyond their arrival in a step with this trace; None: nobody knows its trace."""
        if self.gradients is GradientUse.UPDATE and trace is not None:
            return kept_gradients(trace, self.layout)
        return frozenset(() if self.gradients is GradientUse.NONE else self.layout.slices)

    def sizes(self, kept: Collection[str]) -> tuple[int, int]:
        """Bytes of all model states together on the tier that computes, and of those among them that are no units.

        These are these gradients, as tensors of fp32, copies of weights in the type that computes, and elements by which changes by hand are found.
        """
        formats, layout = self.formats.now, self.layout
        units = formats.units(layout, tuple(plane for plane in self.gradients.planes if plane != GRAD))
        slots = sum(slots_of(ref, layout, formats) for ref in units)
        places = [place for name, place in layout.slices.items() if name in kept]
        trained = [place for place in places if formats.is_trained(place.chunk, layout)]
        device = self.budgets.device.type
        beside_bytes = sum(block_bytes(4 * place.numel, device) for place in trained)
        dtypes, copied = self.precision.parameter_dtypes(layout), self.precision.copied(layout)
        for name, piece in layout.slices.items():
            if name in copied or formats.is_split(piece.chunk, layout):
                beside_bytes += block_bytes(dtypes[name].itemsize * piece.numel, device)
        return slots * bytes_of_slot(layout, formats) + beside_bytes, beside_bytes

    def places(self, model: nn.Module, names: Mapping[int, str]) -> tuple[Place, ...]:
        """The outermost blocks of a model that may be bound at once. `names`: of its parameters, by `id()`."""
        has_tiles = self.memory.options.tile_rows is not None
        return () if self.binding == "use" or has_tiles else places_in(model, names)

    def touches(self, updates: Callable[[str], bool]) -> Touches:
        """The units that events touch, with counts of uses that begin at none. `updates`: tells which parameters the optimizer has."""
        return Touches(self.layout, gradients=self.gradients, updates=updates, formats=self.formats)

    def tracer(self, updates: Callable[[str], bool]) -> OfflineTracer:
        """The tracer of forwards that have not been run."""
        return OfflineTracer(
            layout=self.layout,
            make_touches=lambda: self.touches(updates),
            dtypes=self.precision.parameter_dtypes(self.layout),
            copied=self.precision.copied(self.layout),
            scales=self.precision.scales,
            device=self.budgets.trial_device,
            on_device=self.budgets.stream_device is not None,
            compute=self.precision.compute,
            travel=self.precision.travel,
        )

    def planner(self, choice: UpdateChoice, made: Callable[[Plan, Trace], object] = lambda *_: None) -> Planner:
        """The planner of steps. `choice`: where updates are done; `made`: as `Planner` has it."""
        fused = self.budgets.stream_device is not None and not self.budgets.passes.update  # one launch, without scratch
        if fused and self.precision.mixed and choice.tier is None:
            # In 16 bits the host takes nine passes where the GPU takes one: longer than the link takes for all states (decision 0068).
            choice = replace(choice, tier=lambda _: Tier.DEVICE)
        return Planner(
            layout=self.layout,
            formats=self.formats,
            budgets=self.budgets,
            policy=self.memory.options.eviction,
            prefetch=self.memory.options.prefetch,
            choice=choice,
            weaves=self.gradients is GradientUse.CHUNK and not choice.apart,
            keeps=self.budgets.stream_device is not None,
            norm_bytes=self.budgets.passes.norm,
            update_bytes=self.budgets.passes.update,
            checks=self.memory.options.poison,
            made=made,
        )


def set_up(
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    memory: MemoryOptions,
    has: Resources,
    *,
    trained: Callable[[nn.Parameter], bool] = lambda parameter: parameter.requires_grad,
    trains: bool = True,
    find_passes: Callable[[torch.device], Mapping[str, Passes]] | None = None,
    binding: BindingKind = "whole",
    ranks: Ranks | RankOf | None = None,
    everyone: Ranks | RankOf | None = None,
    sizes: Sequence[int] = (),
) -> Setup:
    """The ground for a model and options of `manage`, which have been checked.

    Args:
        has: what the machine has. trained: tells whether a parameter needs more than its weight. trains: whether there is an optimizer.
        find_passes: finds the kernels of a device; None: they are those of a GPU. binding: how parameters are bound at most.
        ranks: that share the model; None: there is one process. everyone: that on one machine share its budgets; None: those ranks.
        sizes: of an elastic job: all numbers of ranks over which chunks may come to be cut.

    Raises:
        BudgetError, DeviceError, LayoutError: what is asked for cannot be had.
    """
    elastic = bool(sizes)
    precision = find_precision(memory, model, has, over_ranks=ranks is not None or elastic, in_parts=elastic)
    layout = layout_of(
        model, named, memory, precision, granule_bytes=has.granule_bytes, trained=trained, ranks=ranks, sizes=sizes
    )
    gradients = GradientUse.UPDATE if memory.step == "in_backward" else GradientUse.CHUNK
    present, absent = present_and_absent_bytes(named.values())
    everyone = everyone or ranks
    local_ranks = 1 if everyone is None else everyone.local_size
    budgets = find_budgets(memory, weight_bytes=present, absent_bytes=absent, has=has, local_ranks=local_ranks)
    passes = None if find_passes is None else find_passes(budgets.device) if trains else {}
    return Setup(
        memory=memory,
        precision=precision,
        layout=layout,
        budgets=with_pass_bytes(budgets, layout, memory, precision, passes=passes),
        gradients=gradients if trains else GradientUse.NONE,
        formats=SessionFormats(precision.formats),
        passes=passes,
        binding=binding,
        has_gradients=any(parameter.grad is not None for parameter in named.values()),
        ranks=ranks,
    )


def layout_of(
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    memory: MemoryOptions,
    precision: Precision,
    *,
    granule_bytes: int,
    trained: Callable[[nn.Parameter], bool],
    ranks: Ranks | RankOf | None,
    sizes: Sequence[int],
) -> Layout:
    """The layout of a model's parameters. What stays fp32 whole has chunks of its own in 16-bit modes, and so has what is not trained.

    `granule_bytes`: what memory of the tier that computes comes in; 0: in pages. `ranks`: that share each chunk, of which the layout is this one's.
    """
    tiles = find_tiles(model, named, memory.options.tile_rows)
    blocks = {} if ranks is None and not sizes else blocks_alone(model, named)
    # A multiple of all numbers of ranks.
    whole, size = precision.whole, math.lcm(*sizes, 1 if ranks is None else ranks.size)
    specs = [
        TensorSpec(name, tuple(p.shape), trained(p), lies_in(name, whole), tiles.get(name), blocks.get(name, ""))
        for name, p in named.items()
    ]
    granule_numel = granule_bytes // precision.formats.narrowest
    chunk_numel = memory.options.chunk_size or search_chunk_numel(specs, granule_numel=granule_numel, ranks=size)
    if precision.mixed:  # slots are whole pages in 16 bits too
        chunk_numel = whole_grains(chunk_numel, grain=GRAIN * size)
    if 0 < granule_numel < chunk_numel:  # smaller chunks were asked for: several share a granule
        chunk_numel = whole_grains(chunk_numel, grain=granule_numel)
    layout = build_layout(specs, chunk_numel=chunk_numel)
    return layout if ranks is None else shard_of(layout, ranks.rank, ranks.size)


def blocks_alone(model: nn.Module, named: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """The blocks of a model's parameters, by name, as far as they repeat and all owners of a parameter lie in one."""
    names = names_by_id(named)
    owners: dict[str, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if id(parameter) in names:
                owners.setdefault(names[id(parameter)], []).append(f"{path}.")
    return {
        name: place.path
        for place in places_in(model, names)
        for name in place.names
        if place.repeats and all(path.startswith(f"{place.path}.") for path in owners[name])
    }


def find_tiles(model: nn.Module, named: Mapping[str, nn.Parameter], rows: int | None) -> dict[str, int]:
    """Elements of a tile, by name, of the weights of linears and embeddings that have more rows than this; None: no weight has tiles.

    The output of `nn.MultiheadAttention` has none: torch uses its weight inside of one operation for the whole attention.

    Raises:
        LayoutError: such a weight has hooks, which a gradient that comes in tiles would not call.
    """
    if rows is None:
        return {}
    names = names_by_id(named)
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    not_called = {part for attention in attentions for part in attention.modules()}
    tiles = {}
    for module in model.modules():
        has_some = isinstance(module, nn.Linear | nn.Embedding) and module not in not_called
        weight = module._parameters.get("weight") if has_some else None
        if weight is None or weight.shape[0] <= rows or not weight.numel():
            continue
        name = names[id(weight)]
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            raise LayoutError(f"{name} has hooks, and would be used in tiles of {rows} rows: {NOT_ONE_TENSOR}")
        tiles[name] = rows * (weight.numel() // weight.shape[0])
    return tiles


def with_pass_bytes(
    budgets: Budgets,
    layout: Layout,
    memory: MemoryOptions,
    precision: Precision,
    *,
    passes: Mapping[str, Passes] | None = None,
) -> Budgets:
    """The budgets, with what passes over planes take of a device whose memory torch gives out, and looks for overflows.

    `passes`: by type of device; None: those of a GPU.
    """
    if budgets.stream_device is None:
        return budgets
    here = None if passes is None else passes.get(budgets.device.type)
    if passes is not None and here is None:
        return budgets  # nothing is trained
    largest, tensors = layout.largest_numel, len(layout.slices)
    is_split = any(precision.formats.is_split(chunk, layout) for chunk in range(layout.n_chunks))
    taken = (
        triton_bytes(largest, tensors)
        if here is None
        else here.scratch_bytes(layout.chunk_numel, is_split=is_split, largest=largest, tensors=tensors)
    )
    if isinstance(layout, ShardLayout):
        taken = replace(taken, norm=SharedNorm.bytes_of(layout))
    backwards = memory.options.accumulate or 1
    looks = backwards * sum(len(layout.parts(name)) for name in layout.slices) if precision.scales else 0
    flags = overflow_bytes(looks) if looks else 0  # there from a backward to the norm, which nothing fixed counts for
    return replace(budgets, passes=replace(taken, norm=taken.norm + flags), fixed_bytes=budgets.fixed_bytes + flags)


def resting_state(setup: Setup, *, clips: bool = False) -> Residency:
    """The state with every unit at home, without contents yet. Gradients that are used as they arrive have no home: see Note [Homes of gradients].

    Args:
        clips: whether each step takes the norm of its gradients.

    Raises:
        BudgetError: no batch could fit: homes, a weight on its own, the norm, or the update of a chunk do not.
    """
    layout, gradients, formats, passes = setup.layout, setup.gradients, setup.formats.now, setup.budgets.passes
    machine = setup.budgets.machine
    uses = tuple(Moment(Phase.FORWARD, run.tensors[0], (Touch(PlaneRef(run.head, WEIGHT)),)) for run in layout.runs)
    traces = [Trace(uses)]
    if gradients is not GradientUse.NONE:
        in_chunks = gradients is GradientUse.CHUNK
        scratch = passes.update
        traces.append(step_trace(layout, layout.slices, formats=formats, in_plane=in_chunks, scratch_bytes=scratch))
        if clips and in_chunks:
            traces.append(norm_trace(layout, layout.slices, formats=formats, scratch_bytes=passes.norm))

    def with_homes(home: Mapping[PlaneRef, Tier]) -> Residency:
        state = Residency.at_rest(layout, compute=machine.compute, home=home, free=home, formats=formats)
        expect_room(max((worst_moment(trace, start=state) for trace in traces), key=lambda need: need.nbytes), machine)
        return state

    # Below the compute tier where there is room below, so that activations nobody has seen yet find room too: what fits stays there all the same,
    # as cached copies that never have to move. And where there is no room below for all, as little as can be rests on the compute tier.
    has_below = machine.compute is not Tier.HOST or Tier.DISK in machine.budget
    all_of_it = machine.budget[machine.compute] if has_below else 0
    try:
        return with_homes(place(layout, machine, planes=gradients.planes, nonmodel_bytes=all_of_it, formats=formats))
    except BudgetError:
        with suppress(BudgetError):
            if has_below:
                return with_homes(place_on_all_tiers(layout, machine, planes=gradients.planes, formats=formats))
        raise


def add_gradients(state: Residency, trace: Trace, setup: Setup, machine: Machine) -> None:
    """Gives homes to the gradients that a forward with this trace keeps, where others are used as they arrive. BudgetError: they do not fit."""
    if setup.gradients is GradientUse.UPDATE:
        kept, why, formats = trace.touched(GRAD), name_gradients(trace), setup.formats.now
        state.grow(*place_gradients(machine, kept, state=state, layout=setup.layout, formats=formats, why=why))
