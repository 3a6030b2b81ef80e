"""Small layouts, traces and machines written as text, and Hypothesis strategies for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from patrickstar.core.formats import FP32
from patrickstar.core.layout import Layout, TensorSpec, build_layout
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import GRAD, WEIGHT, PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.plan.check import check
from patrickstar.plan.fit import worst_moment
from patrickstar.plan.make import make_plan
from patrickstar.plan.plan import Plan
from patrickstar.plan.residency import Residency, bytes_of_slot, slots_of
from tests.plan.texts import moment, snapshot, unit

CHUNK_NUMEL = 16
SLOT_BYTES = CHUNK_NUMEL * 4
PLENTY = 1 << 40

# No deadline: another process on the machine is no failure. Fewer examples where each one is an instance.
few = settings(max_examples=15, deadline=None)
some = settings(max_examples=40, deadline=None)


def layout_of(*lengths: int) -> Layout:
    """A layout of runs of these lengths, one tensor each."""
    specs = [TensorSpec(f"p{i}", (length * CHUNK_NUMEL,)) for i, length in enumerate(lengths)]
    return build_layout(specs, chunk_numel=CHUNK_NUMEL)


def trace_of(*moments: str, nonmodel: int | Sequence[int] = 0) -> Trace:
    """A trace from texts such as `"c0.weight c1.grad* held c2.weight"`."""
    sizes = [nonmodel] * len(moments) if isinstance(nonmodel, int) else nonmodel
    return Trace(tuple(moment(text, f"p{i}", size) for i, (text, size) in enumerate(zip(moments, sizes, strict=True))))


def host_over_disk(slots: int, *, nonmodel: int = 0) -> Machine:
    return Machine(Tier.HOST, {Tier.HOST: slots * SLOT_BYTES + nonmodel, Tier.DISK: PLENTY})


def device_over_host(slots: int) -> Machine:
    return Machine(Tier.DEVICE, {Tier.DEVICE: slots * SLOT_BYTES, Tier.HOST: PLENTY, Tier.DISK: PLENTY})


def resting(
    layout: Layout,
    *,
    compute: Tier = Tier.HOST,
    home: Tier = Tier.DISK,
    planes: Sequence[str] = (WEIGHT, GRAD),
    free: Iterable[PlaneRef] = (),
) -> Residency:
    """Every unit at one home below, with contents."""
    homes = dict.fromkeys(layout.units(planes), home)
    return Residency.at_rest(layout, compute=compute, home=homes, formats=FP32, free=set(free))


def state_of(
    text: str, *, compute: Tier = Tier.HOST, home: Tier = Tier.DISK, slots: Mapping[str, int] | None = None
) -> Residency:
    """A state from text such as `"c0.weight clean, c1.weight away"`, in the words of a snapshot; slots are 1 where not given."""
    lines = [f"on {compute.value}, slots of {SLOT_BYTES} bytes"]
    for entry in text.split(", "):
        word, condition = entry.split()
        ref, rests = unit(word), compute if condition == "here" else home
        lines.append(f"  {ref.plane} {rests.value} {condition} {ref.chunk}x{(slots or {}).get(word, 1)}")
    return Residency.of(snapshot("\n".join(lines)))


@dataclass(frozen=True)
class Instance:
    """Everything `make_plan` takes."""

    layout: Layout
    trace: Trace
    machine: Machine
    start: Residency
    frees: tuple[tuple[int, PlaneRef], ...] = ()
    following: Trace | None = None

    @property
    def budget(self) -> int:
        return self.machine.budget[self.machine.compute]

    @property
    def arguments(self) -> dict[str, object]:
        return {"layout": self.layout, "machine": self.machine, "start": self.start, "frees": self.frees}

    def planned(self, policy: str = "next-use") -> Plan:
        return make_plan(self.trace, following=self.following, policy=policy, **self.arguments)  # type: ignore[arg-type]


def before_each_moment(plan: Plan) -> list[str]:
    return [", ".join(map(str, actions)) for actions in plan.moments]


def legal_plan(trace: Trace, *, layout: Layout, machine: Machine, start: Residency, **others: Any) -> Plan:
    """A plan, which keeps every invariant."""
    plan = make_plan(trace, layout=layout, machine=machine, start=start, **others)
    expect_legal(plan, trace, layout, machine)
    return plan


def expect_legal(plan: Plan, trace: Trace, layout: Layout, machine: Machine) -> None:
    """A plan keeps every invariant."""
    found = check(plan, trace, layout, machine)
    assert found == [], f"{found}\n{plan}\n{trace}"


@st.composite
def traces(draw: st.DrawFn, refs: Sequence[PlaneRef], *, most_moments: int = 8, writes: bool = True) -> Trace:
    """Moments that touch up to three units; some of them stay held for a while."""
    moments: list[Moment] = []
    held = draw(st.dictionaries(st.sampled_from(refs), st.integers(1, 2), max_size=1))  # by what came before
    for index in range(draw(st.integers(1, most_moments))):
        touches = draw(st.lists(st.sampled_from(refs), max_size=3, unique=True))
        moments.append(
            Moment(
                phase=draw(st.sampled_from(Phase)),
                label=f"p{index}",
                touches=tuple(Touch(ref, writes and draw(st.booleans())) for ref in touches),
                held=tuple(held),
                nonmodel_bytes=draw(st.integers(0, 3 * SLOT_BYTES)),
            )
        )
        held = {ref: left - 1 for ref, left in held.items() if left > 1}
        held |= {ref: left for ref in touches if (left := draw(st.sampled_from([0, 0, 0, 1, 2])))}
    return Trace(tuple(moments))


@st.composite
def starts(
    draw: st.DrawFn, layout: Layout, refs: Sequence[PlaneRef], compute: Tier, *, flights: bool = False
) -> Residency:
    """Every unit at some home and in some condition; with copies on the host on the way to the disk, and `flights`: on their way."""
    words = {
        (compute, compute): "free here void",
        (Tier.DEVICE, Tier.HOST): "free away clean dirty void stale",
        (Tier.HOST, Tier.DISK): "free away clean dirty void",
        (Tier.DEVICE, Tier.DISK): """free away clean dirty void stale
            free,stale void,stale away,clean away,dirty clean,clean clean,dirty clean,stale dirty,stale""",
    }
    moving = {
        (Tier.DEVICE, Tier.HOST): "away:H>D dirty:D>H",
        (Tier.HOST, Tier.DISK): "away:K>H dirty:H>K",
        (Tier.DEVICE, Tier.DISK): "away:K>H away,clean:H>D away,dirty:H>D dirty:D>H away,dirty:H>K clean,dirty:H>K",
    }
    below = [Tier.HOST, Tier.DISK] if compute is Tier.DEVICE else [Tier.DISK]
    lines = [f"on {compute.value}, slots of {bytes_of_slot(layout, FP32)} bytes"]
    homes = draw(st.sampled_from([[*below, *below, compute], [Tier.DISK]]))
    for ref in refs:
        home = draw(st.sampled_from(homes))
        pair = (compute, home)
        word = draw(st.sampled_from([*words[pair].split(), *(moving.get(pair, "").split() if flights else ())]))
        lines.append(f"  {ref.plane} {home.value} {word} {ref.chunk}x{slots_of(ref, layout, FP32)}")
    return Residency.of(snapshot("\n".join(lines)))


@st.composite
def instances(draw: st.DrawFn, *, lower_tiers: bool = False) -> Instance:
    """Any layout, trace, start and budget. `lower_tiers`: host and disk budgets may bind too."""
    layout = layout_of(*draw(st.lists(st.sampled_from([1, 1, 2, 3]), min_size=1, max_size=3)))
    refs = list(layout.units((WEIGHT, GRAD)[: draw(st.integers(1, 2))]))
    compute = draw(st.sampled_from([Tier.HOST, Tier.DEVICE]))
    trace = draw(traces(refs))
    start = draw(starts(layout, refs, compute))
    most_slots = sum(start.slots.values()) + 3
    sizes = st.integers(0, most_slots * SLOT_BYTES)
    budget = {tier: draw(sizes) if lower_tiers else PLENTY for tier in (Tier.HOST, Tier.DISK)}
    budget[compute] = draw(sizes)
    moments = st.integers(0, len(trace) - 1)
    frees = draw(st.sets(st.tuples(moments, st.sampled_from(refs)), max_size=2))
    following = draw(st.none() | traces(refs, most_moments=3))
    return Instance(layout, trace, Machine(compute, budget), start, tuple(sorted(frees)), following)


@st.composite
def tight_instances(draw: st.DrawFn) -> Instance:
    """Instances whose budget is the smallest that fits, or a slot or two more."""
    instance = draw(instances())
    least = worst_moment(instance.trace, start=instance.start, frees=instance.frees).nbytes
    budget = {**instance.machine.budget, instance.start.compute: least + draw(st.integers(0, 2 * SLOT_BYTES))}
    return replace(instance, machine=Machine(instance.start.compute, budget))


@st.composite
def paging(draw: st.DrawFn) -> Instance:
    """Equal units that are only read, on a host over a disk: what page replacement is known to be optimal for."""
    layout = layout_of(*[1] * draw(st.integers(2, 5)))
    refs = list(layout.units([WEIGHT]))
    trace = draw(traces(refs, most_moments=10, writes=False))
    needed = max(len({t.ref for t in m.touches} | set(m.held)) * SLOT_BYTES + m.nonmodel_bytes for m in trace.moments)
    machine = Machine(Tier.HOST, {Tier.HOST: needed + draw(st.integers(0, 3 * SLOT_BYTES)), Tier.DISK: PLENTY})
    return Instance(layout, trace, machine, resting(layout, planes=[WEIGHT]))
