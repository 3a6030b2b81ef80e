"""Units that are used on the host below a device, and transfers that are under way as a plan begins: plans and their check agree on them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.core.machine import Machine, Tier
from patrickstar.core.trace import Moment, Touch, Trace
from patrickstar.errors import BudgetError
from patrickstar.plan.check import check
from patrickstar.plan.eviction import POLICIES
from patrickstar.plan.fit import pinned_at, worst_moment
from patrickstar.plan.simulate import simulate
from tests.plan.builders import (
    SLOT_BYTES,
    Instance,
    device_over_host,
    expect_legal,
    instances,
    layout_of,
    legal_plan,
    resting,
    some,
    starts,
    trace_of,
)
from tests.plan.naive import replay
from tests.plan.texts import unit


def test_what_is_used_on_the_host_crosses_no_link() -> None:
    layout = layout_of(1, 1)
    trace = trace_of("c0.weight@H c1.weight@H", "c0.grad@H* c1.grad@H*")
    machine = device_over_host(1)
    start = resting(layout, compute=Tier.DEVICE, home=Tier.HOST, free=layout.units(["grad"]))
    plan = legal_plan(trace, layout=layout, machine=machine, start=start)
    moved = simulate(plan, trace).moved
    assert (moved["H>D"], moved["D>H"]) == (0, 0)
    assert unit("c0.grad") in plan.end.newest
    without = replace(plan, moments=tuple(() for _ in plan.moments))
    assert any("(1)" in found for found in check(without, trace, layout, machine))


@st.composite
def with_host_touches(draw: st.DrawFn) -> Instance:
    """Some moments also use units on the host that nobody uses elsewhere then; copies may be there, and on their way, as the plan begins."""
    instance = draw(instances().filter(lambda drawn: drawn.machine.compute is Tier.DEVICE))
    start = draw(starts(instance.layout, sorted(instance.start.home), Tier.DEVICE, flights=True))
    below = [ref for ref, tier in start.home.items() if tier is not Tier.DEVICE]
    moments: list[Moment] = []
    most = 0
    for moment in instance.trace.moments:
        usable = [ref for ref in below if ref not in pinned_at(moment)]
        wanted = draw(st.lists(st.sampled_from(usable), max_size=2, unique=True)) if usable else []
        touches = [Touch(ref, draw(st.booleans()), Tier.HOST) for ref in wanted]
        cached = sum(start.slots[ref] for ref in wanted if start.home[ref] is Tier.DISK)
        largest = max((start.slots[ref] for ref in below if start.home[ref] is Tier.DISK), default=0)
        most = max(most, cached + largest)
        moments.append(replace(moment, touches=(*moment.touches, *touches)))
    trace = Trace(tuple(moments))
    resting_slots = sum(start.slots[ref] for ref in below if start.home[ref] is Tier.HOST)
    host = (resting_slots + most + draw(st.integers(0, 2))) * SLOT_BYTES
    least = worst_moment(trace, start=start, frees=instance.frees).nbytes
    budget = {**instance.machine.budget, Tier.HOST: host, Tier.DEVICE: least + draw(st.integers(0, 2 * SLOT_BYTES))}
    return replace(instance, trace=trace, start=start, machine=Machine(Tier.DEVICE, budget))


@settings(max_examples=150, deadline=None)
@given(instance=with_host_touches(), policy=st.sampled_from(sorted(POLICIES)))
def test_plans_keep_every_invariant_in_tight_tiers(instance: Instance, policy: str) -> None:
    trace, machine = instance.trace, instance.machine
    plan = instance.planned(policy)
    expect_legal(plan, trace, instance.layout, machine)
    simulated = simulate(plan, trace)
    assert simulated.peak["device"] <= machine.budget[Tier.DEVICE]
    start = instance.start
    at_start = (start.slots_resting[Tier.HOST] + start.slots_used[Tier.HOST]) * SLOT_BYTES
    assert simulated.peak["host"] <= max(machine.budget[Tier.HOST], at_start)
    curve, moves, _ = replay(plan, machine, trace)
    assert list(simulated.per_moment) == curve
    assert simulated.moved == {link: sum(moved[link] for moved in moves) for link in simulated.moved}


@some
@given(instance=instances(), data=st.data())
def test_what_is_under_way_as_a_plan_begins_is_waited_for_once(instance: Instance, data: st.DataObject) -> None:
    start = data.draw(starts(instance.layout, sorted(instance.start.home), instance.machine.compute, flights=True))
    instance = replace(instance, start=start, frees=())
    try:
        plan = instance.planned()
    except BudgetError:
        return
    expect_legal(plan, instance.trace, instance.layout, instance.machine)
