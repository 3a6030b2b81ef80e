"""Plans keep every invariant or are refused for a reason, and move no more than they must."""

from __future__ import annotations

import gc
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, WEIGHT, PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.errors import BudgetError
from patrickstar.plan.actions import is_copy
from patrickstar.plan.check import check
from patrickstar.plan.eviction import POLICIES
from patrickstar.plan.make import make_plan
from patrickstar.plan.plan import Plan
from patrickstar.plan.residency import Residency, apply, release
from patrickstar.plan.simulate import simulate
from tests.plan.builders import (
    PLENTY,
    SLOT_BYTES,
    Instance,
    before_each_moment,
    expect_legal,
    few,
    host_over_disk,
    instances,
    layout_of,
    paging,
    resting,
    some,
    tight_instances,
    trace_of,
)
from tests.plan.naive import fewest_fetches, needed_bytes
from tests.plan.texts import unit

policies = st.sampled_from(sorted(POLICIES))


def fetches(plan: Plan) -> int:
    return sum(is_copy(action) and action.work.tier is plan.start.compute for action in plan.actions())


@some
@given(instance=instances() | tight_instances(), policy=policies)
def test_a_plan_keeps_every_invariant_or_is_refused_for_a_reason(instance: Instance, policy: str) -> None:
    needed = needed_bytes(instance)
    before = instance.start.copy()
    if instance.budget < max(needed):  # refused only where it must be, and there always
        with pytest.raises(BudgetError) as refused:
            instance.planned(policy)
        assert refused.value.needed_bytes == refused.value.smallest_bytes == max(needed)
        assert refused.value.available_bytes == instance.budget
        assert refused.value.moment == instance.trace.name(needed.index(max(needed)))
        assert refused.value.tier == instance.machine.compute.label
    else:
        plan = instance.planned(policy)
        expect_legal(plan, instance.trace, instance.layout, instance.machine)
        peak = simulate(plan, instance.trace).peak
        assert max(needed) <= peak[instance.machine.compute.label] <= instance.budget
    assert instance.start == before


@few
@given(instance=instances(lower_tiers=True))
def test_lower_tiers_are_never_overfull_either(instance: Instance) -> None:
    start, compute, budget = instance.start, instance.machine.compute, instance.machine.budget
    below = dict.fromkeys(Tier, 0)
    for ref, tier in start.home.items():
        below[tier] += start.unit_bytes(ref)
    staged = [start.unit_bytes(ref) for ref in start.home if (compute, start.home[ref]) == (Tier.DEVICE, Tier.DISK)]
    below[Tier.HOST] += max(staged, default=0)
    needed = {**below, compute: max(needed_bytes(instance))}
    if any(needed[tier] > nbytes for tier, nbytes in budget.items()):
        with pytest.raises(BudgetError) as refused:
            instance.planned()
        tier = Tier[refused.value.tier.upper()]
        assert refused.value.needed_bytes == needed[tier] > refused.value.available_bytes == budget[tier]
    else:
        plan = instance.planned()
        expect_legal(plan, instance.trace, instance.layout, instance.machine)
        peak = simulate(plan, instance.trace).peak
        assert all(peak[tier.label] <= nbytes for tier, nbytes in instance.machine.budget.items())


@few
@given(instance=instances(), policy=policies)
def test_the_same_input_gives_the_same_plan(instance: Instance, policy: str) -> None:
    try:
        plan = instance.planned(policy)
    except BudgetError:
        return
    assert instance.planned(policy) == plan


@some
@given(instance=paging())
def test_next_use_fetches_as_little_as_any_choice_could_and_never_more_than_lru(instance: Instance) -> None:
    fewest = fewest_fetches(instance)
    assert fetches(instance.planned()) == fewest
    assert fetches(instance.planned("lru")) >= fewest


def test_lru_does_fetch_more_where_units_are_used_in_turn() -> None:
    layout, trace = layout_of(1, 1, 1), trace_of(*["c0.weight", "c1.weight", "c2.weight"] * 3)
    instance = Instance(layout, trace, host_over_disk(2), resting(layout))
    assert (fetches(instance.planned()), fetches(instance.planned("lru"))) == (6, 9)


def test_a_plan_reads_as_expected() -> None:
    layout = layout_of(1, 2, 1)
    trace = trace_of("c0.weight", "c1.weight", "c1.weight c1.grad*", "c3.weight", nonmodel=[0, 5, 0, 64])
    start = resting(layout, free=layout.units(["grad"]))
    plan = make_plan(trace, layout=layout, machine=host_over_disk(3, nonmodel=8), start=start)
    assert before_each_moment(plan) == [
        "c0.weight K>H, c0.weight H?",
        "c1.weight K>H x2, c1.weight H?",
        "c0.weight H!, c1.grad 0>H",
        "c1.weight H! x2, c3.weight K>H, c3.weight H?",
    ]


def test_space_that_activations_take_is_given_up_before_it_is_missed() -> None:
    layout = layout_of(1, 1, 1)
    trace = trace_of("c0.weight c1.weight c2.weight", "c2.weight", "c2.weight", nonmodel=[0, 2 * SLOT_BYTES, 0])
    plan = make_plan(trace, layout=layout, machine=host_over_disk(3), start=resting(layout))
    assert before_each_moment(plan)[1:] == ["c0.weight H!, c1.weight H!", ""]
    assert simulate(plan, trace).slots == (3, 1, 1)


def test_a_start_above_the_first_moments_capacity_is_evicted_first() -> None:
    layout, trace = layout_of(1, 1, 1), trace_of("c0.weight")
    first = make_plan(
        trace_of("c0.weight c1.weight c2.weight"), layout=layout, machine=host_over_disk(3), start=resting(layout)
    )
    plan = make_plan(trace, layout=layout, machine=host_over_disk(1), start=Residency.of(first.end))
    assert before_each_moment(plan) == ["c1.weight H!, c2.weight H!"]


def test_what_the_next_trace_uses_first_is_kept_to_the_end() -> None:
    layout, trace = layout_of(1, 1, 1), trace_of("c0.weight", "c1.weight", "c2.weight")
    arguments = {"layout": layout, "machine": host_over_disk(2), "start": resting(layout)}
    backwards = trace_of("c1.weight", "c0.weight")
    assert before_each_moment(make_plan(trace, **arguments))[2].startswith("c1.weight H!")
    assert before_each_moment(make_plan(trace, following=backwards, **arguments))[2].startswith("c0.weight H!")


def test_a_freed_gradient_is_dropped_and_never_written_back() -> None:
    layout = layout_of(1, 1)
    trace = trace_of("c0.grad*", "c0.grad c0.weight*", "c1.weight", "c0.grad*")
    start = resting(layout, free=layout.units(["grad"]))
    arguments = {"layout": layout, "machine": host_over_disk(2), "start": start}
    plan = make_plan(trace, frees=[(1, unit("c0.grad"))], **arguments)
    assert before_each_moment(plan) == [
        "c0.grad 0>H", "c0.weight K>H, c0.weight H?", "c0.grad H!, c1.weight K>H, c1.weight H?",
        "c1.weight H!, c0.grad 0>H",
    ]  # fmt: skip
    assert "c0.grad H>K" in str(make_plan(trace_of("c0.grad*", "c0.weight c1.weight"), **arguments))


def test_plans_chain_over_steps_with_gradients_released_between() -> None:
    layout = layout_of(1, 2, 1)
    weights = list(layout.units([WEIGHT]))
    passes = trace_of(
        *[f"{ref}" for ref in weights], *[f"{ref} c{ref.chunk}.grad*" for ref in reversed(weights)], nonmodel=7
    )
    step = trace_of(*[f"c{chunk}.grad c{chunk}.exp_avg* c{layout.run_of(chunk).head}.weight*" for chunk in range(4)])
    planes = (WEIGHT, GRAD, EXP_AVG)
    state = resting(layout, planes=planes, free=layout.units((GRAD, EXP_AVG)))
    machine = host_over_disk(4, nonmodel=7)
    digests = []
    for _ in range(4):
        first = make_plan(passes, layout=layout, machine=machine, start=state, following=step)
        second = make_plan(step, layout=layout, machine=machine, start=Residency.of(first.end), following=passes)
        assert check(first, passes, layout, machine) == check(second, step, layout, machine) == []
        digests.append((first.digest(), second.digest()))
        state = Residency.of(second.end)
        for ref in layout.units([GRAD]):
            for action in release(state, ref):
                apply(state, action)
    assert digests[0] != digests[1]  # the first step creates the moments
    assert digests[2] == digests[3]  # from then on a step ends where it began


def test_homes_that_do_not_fit_below_are_refused() -> None:
    layout, trace = layout_of(1, 1), trace_of("c0.weight")
    machine = Machine(Tier.HOST, {Tier.HOST: PLENTY, Tier.DISK: 3 * SLOT_BYTES})
    with pytest.raises(BudgetError, match="disk memory is 64 B short for the model states kept there") as refused:
        make_plan(trace, layout=layout, machine=machine, start=resting(layout))
    assert (refused.value.tier, refused.value.needed_bytes) == ("disk", 4 * SLOT_BYTES)


def test_planning_time_grows_with_the_plan_not_with_chunks_times_moments() -> None:
    n_chunks = 2240
    planes = (WEIGHT, GRAD, EXP_AVG, EXP_AVG_SQ)
    layout = layout_of(*[1] * n_chunks)
    step = [
        Moment(Phase.STEP, "", tuple(Touch(PlaneRef(chunk, plane), plane != GRAD) for plane in planes))
        for chunk in range(n_chunks)
    ]
    start, machine = resting(layout, planes=planes), host_over_disk(2 * n_chunks)

    def seconds() -> float:
        began = time.process_time()
        plan = make_plan(Trace(tuple(step)), layout=layout, machine=machine, start=start)
        took = time.process_time() - began
        assert fetches(plan) == 4 * n_chunks
        return took

    # It takes some 0.15 s. Sorting all candidates at each eviction took 2.4; the best of three is no accident.
    assert any(seconds() < 1 for _ in range(3))


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_is_looked_for_again_after_a_plan_and_after_a_refusal(is_on: bool) -> None:
    layout, trace = layout_of(1), trace_of("c0.weight")
    start = resting(layout, planes=["weight"])
    was_on = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        make_plan(trace, layout=layout, machine=host_over_disk(1), start=start)
        assert gc.isenabled() == is_on
        with pytest.raises(BudgetError):
            make_plan(trace, layout=layout, machine=host_over_disk(0), start=start)
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()
