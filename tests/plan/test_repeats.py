"""Plans of a stretch that follows itself come to be one plan."""

from __future__ import annotations

from hypothesis import given, settings

from patrickstar.core.machine import Tier
from patrickstar.errors import BudgetError
from patrickstar.plan.make import make_plan, must_repeat
from patrickstar.plan.plan import Plan
from patrickstar.plan.residency import Residency
from patrickstar.plan.simulate import simulate
from tests.plan.builders import Instance, expect_legal, host_over_disk, instances, layout_of, resting, trace_of
from tests.plan.texts import unit

CHUNKS = 12

many = settings(max_examples=200, deadline=None)
"""Most of the instances have a budget that nothing fits."""


def steps(instance: Instance, count: int, *, free: int | None) -> list[Plan]:
    """Plans one after the other, the first `free` of them without an eye on the next (None: all)."""
    state, plans = instance.start, list[Plan]()
    for number in range(count):
        repeats = free is not None and number >= free
        plans.append(make_plan(instance.trace, **{**instance.arguments, "start": state}, repeats=repeats))  # type: ignore[arg-type]
        state = Residency.of(plans[-1].end)
    return plans


@many
@given(instance=instances() | instances(lower_tiers=True))
def test_what_is_there_at_the_end_was_there_at_the_beginning_or_has_just_been_used(instance: Instance) -> None:
    start, compute = instance.start, instance.machine.compute
    try:
        (plan,) = steps(instance, 1, free=0)
    except BudgetError:
        return
    expect_legal(plan, instance.trace, instance.layout, instance.machine)
    peak = simulate(plan, instance.trace).peak
    at_start = {
        tier.label: (start.slots_resting[tier] + used) * start.slot_bytes for tier, used in start.slots_used.items()
    }
    assert all(
        peak[tier.label] <= max(nbytes, at_start.get(tier.label, 0)) for tier, nbytes in instance.machine.budget.items()
    )
    last = instance.trace.moments[-1]
    used = {touch.ref for touch in last.touches} | set(last.held)
    at_home = {ref for ref, tier in start.home.items() if tier is compute}
    # Slots that the next plan gives back first of all.
    let_go = {ref for index, ref in plan.frees if index == len(instance.trace) - 1}
    assert set(plan.end.taken[compute]) <= start.taken[compute] | used | at_home | let_go


@many
@given(instance=instances())
def test_plans_settle_after_no_more_steps_than_there_are_units(instance: Instance) -> None:
    """What stays from one end to the next becomes less in each step until it is the same."""
    try:
        plans = steps(instance, len(instance.start.home) + 4, free=2)
    except BudgetError:
        return
    assert plans[-1].digest() == plans[-2].digest()


def in_turn() -> Instance:
    """Chunks that are used forwards and backwards, there each with its moments: what a backward that updates them uses."""
    layout = layout_of(*[1] * CHUNKS)
    forwards = [f"c{number}.weight" for number in range(CHUNKS)]
    backwards = [f"c{number}.weight* c{number}.exp_avg* c{number}.exp_avg_sq*" for number in reversed(range(CHUNKS))]
    start = resting(layout, planes=("weight", "exp_avg", "exp_avg_sq"))
    return Instance(layout, trace_of(*forwards, *backwards), host_over_disk(15), start)


def test_beladys_rule_alone_does_not_come_to_repeat_itself_soon() -> None:
    plans = steps(in_turn(), 8, free=None)
    assert len({plan.digest() for plan in plans}) == 8


def test_after_some_plans_the_next_repeat_themselves_at_the_same_price() -> None:
    instance = in_turn()
    free, settled = steps(instance, 8, free=None), steps(instance, 8, free=3)
    assert [plan.digest() for plan in settled[:3]] == [plan.digest() for plan in free[:3]]
    assert len({plan.digest() for plan in settled[3:]}) == 1

    def fetched(plan: Plan) -> int:
        return simulate(plan, instance.trace).moved["K>H"]

    assert fetched(settled[-1]) == fetched(free[-1])


def test_only_a_stretch_that_follows_itself_can_repeat_itself() -> None:
    trace, other = trace_of("c0.weight"), trace_of("c0.weight")
    assert [must_repeat(earlier, trace=trace, following=None) for earlier in (0, 5, 6, 9)] == [False, False, True, True]
    assert must_repeat(6, trace=trace, following=trace)
    assert not must_repeat(6, trace=trace, following=other)


def test_what_came_during_a_step_leaves_at_its_last_moment_though_there_is_room() -> None:
    layout = layout_of(1, 1)
    arguments = {"layout": layout, "machine": host_over_disk(4), "start": resting(layout, planes=("weight",))}
    plan = make_plan(trace_of("c0.weight", "c1.weight"), **arguments, repeats=True)
    assert [str(action) for action in plan.moments[1][:1]] == ["c0.weight H!"]
    assert set(plan.end.taken[Tier.HOST]) == {unit("c1.weight")}


def test_what_the_last_moment_needs_besides_what_leaves_is_taken_from_what_was_there() -> None:
    layout = layout_of(*[1] * 5)
    state = resting(layout, planes=("weight",))
    first = make_plan(trace_of("c0.weight", "c1.weight"), layout=layout, machine=host_over_disk(3), start=state)
    trace = trace_of("c0.weight", "c2.weight", "c3.weight c4.weight")
    instance = Instance(layout, trace, host_over_disk(3), Residency.of(first.end))
    (plan,) = steps(instance, 1, free=0)
    expect_legal(plan, trace, layout, instance.machine)
    assert [str(action) for action in plan.moments[2][:2]] == ["c2.weight H!", "c1.weight H!"]
    assert set(plan.end.taken[Tier.HOST]) == {unit("c0.weight"), unit("c3.weight"), unit("c4.weight")}


def test_what_is_let_go_at_the_end_is_not_written_back_first() -> None:
    layout = layout_of(1, 1)
    start = resting(layout, free=layout.units(["grad"]))
    arguments = {"layout": layout, "machine": host_over_disk(4), "start": start, "repeats": True}
    plan = make_plan(trace_of("c0.grad* c0.weight", "c1.weight"), frees=[(1, unit("c0.grad"))], **arguments)
    assert "c0.grad H>K" not in str(plan)
    assert [str(action) for action in plan.moments[1]] == ["c0.weight H!", "c1.weight K>H", "c1.weight H?"]
