"""The same actions at other moments: what is fetched early, written back early, and dropped in time for that."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.core.machine import Machine, Tier
from patrickstar.errors import BudgetError
from patrickstar.plan.actions import Action, Drop, Issue, Wait, WorkKind, is_copy
from patrickstar.plan.eviction import POLICIES
from patrickstar.plan.make import make_plan
from patrickstar.plan.overlap import overlap, overlap_disk
from patrickstar.plan.plan import Plan
from patrickstar.plan.residency import Residency
from patrickstar.plan.simulate import simulate
from tests.plan.builders import (
    PLENTY,
    SLOT_BYTES,
    Instance,
    before_each_moment,
    device_over_host,
    expect_legal,
    host_over_disk,
    instances,
    layout_of,
    resting,
    state_of,
    tight_instances,
    trace_of,
)
from tests.plan.test_host_touches import with_host_touches
from tests.plan.texts import snapshot


def overlapped(
    *moments: str,
    slots: int,
    start: str = "",
    ahead: int | None = None,
    units: int = 4,
    nonmodel: list[int] | None = None,
) -> list[str]:
    """The actions before each moment, of a plan on a host over a disk whose transfers begin early."""
    layout = layout_of(*[1] * units)
    trace = trace_of(*moments, nonmodel=nonmodel or 0)
    machine = host_over_disk(slots)
    state = state_of(start) if start else resting(layout, planes=["weight"])
    plan = overlap(make_plan(trace, layout=layout, machine=machine, start=state), trace, moments_ahead=ahead)
    expect_legal(plan, trace, layout, machine)
    return before_each_moment(plan)


def test_what_has_free_slots_is_fetched_from_the_first_moment_on_in_the_order_of_use() -> None:
    assert overlapped("c0.weight", "c1.weight", "c2.weight", slots=3) == [
        "c0.weight K>H, c1.weight K>H, c2.weight K>H, c0.weight H?",
        "c1.weight H?",
        "c2.weight H?",
    ]


def test_what_makes_room_for_early_transfers_leaves_one_slot_of_eight() -> None:
    layout, trace = layout_of(*[1] * 9), trace_of(*(f"c{number}.weight" for number in range(9)))
    for ahead, left in ((0, 1), (None, 2)):
        start = resting(layout, planes=["weight"])
        plan = make_plan(trace, layout=layout, machine=host_over_disk(8), start=start, prefetch=ahead)
        expect_legal(plan, trace, layout, host_over_disk(8))
        assert sum(isinstance(action, Drop) for action in plan.actions()) == left


def test_no_more_moments_ahead_than_are_allowed() -> None:
    assert overlapped("c0.weight", "c1.weight", "c2.weight", slots=3, ahead=1) == [
        "c0.weight K>H, c1.weight K>H, c0.weight H?",
        "c2.weight K>H, c1.weight H?",
        "c2.weight H?",
    ]


def test_nothing_changes_where_nothing_may_come_early() -> None:
    assert overlapped("c0.weight", "c1.weight*", "c2.weight", slots=2, ahead=0) == [
        "c0.weight K>H, c0.weight H?",
        "c1.weight K>H, c1.weight H?",
        "c1.weight H>K, c1.weight K?, c1.weight H!, c2.weight K>H, c2.weight H?",
    ]


def test_what_leaves_clean_leaves_after_its_last_use_where_its_slots_are_taken_early() -> None:
    moments = ("c0.weight c1.weight", "c0.weight", "c1.weight", "c1.weight", "c2.weight", "c1.weight")
    assert overlapped(*moments, slots=2) == [
        "c0.weight K>H, c1.weight K>H, c0.weight H?, c1.weight H?", "", "c0.weight H!, c2.weight K>H", "", "c2.weight H?", "",
    ]  # fmt: skip


BOTH_HERE = "c0.weight clean, c1.weight clean, c2.weight away"


def test_a_write_back_begins_after_the_last_write_and_ends_halfway_to_the_use_of_its_slots() -> None:
    moments = ("c1.weight", "c0.weight* c1.weight", "c0.weight*", *["c1.weight"] * 4, "c2.weight")
    assert overlapped(*moments, slots=2, start=BOTH_HERE) == [
        "", "", "", "c0.weight H>K", "", "c0.weight K?, c0.weight H!, c2.weight K>H", "", "c2.weight H?",
    ]  # fmt: skip


def test_a_write_back_begins_when_nobody_has_the_address() -> None:
    moments = ("c1.weight", "c0.weight* c1.weight", "c1.weight held c0.weight", "c1.weight", "c1.weight", "c2.weight")
    assert overlapped(*moments, slots=2, start=BOTH_HERE) == [
        "", "", "", "c0.weight H>K", "c0.weight K?, c0.weight H!, c2.weight K>H", "c2.weight H?",
    ]  # fmt: skip


def test_room_that_activations_take_meanwhile_is_not_used() -> None:
    nonmodel = [0, SLOT_BYTES, 0, 0]
    moments = ("c0.weight", "c0.weight", "c0.weight", "c1.weight")
    assert overlapped(*moments, slots=2, nonmodel=nonmodel) == [
        "c0.weight K>H, c0.weight H?", "", "c1.weight K>H", "c1.weight H?",
    ]  # fmt: skip


def test_a_unit_comes_back_after_it_has_left_and_not_before() -> None:
    moments = ("c0.weight*", "c1.weight", "c2.weight c1.weight", "c1.weight", "c0.weight", "c1.weight")
    assert overlapped(*moments, slots=2) == [
        "c0.weight K>H, c1.weight K>H, c0.weight H?",
        "c0.weight H>K, c1.weight H?",
        "c0.weight K?, c0.weight H!, c2.weight K>H, c2.weight H?",
        "c2.weight H!, c0.weight K>H",
        "c0.weight H?",
        "",
    ]


def test_what_is_written_on_the_host_comes_after_that() -> None:
    layout = layout_of(1, 1)
    trace = trace_of("c0.weight", "c0.weight@H*", "c1.weight", "c0.weight")
    machine = device_over_host(2)
    start = resting(layout, compute=Tier.DEVICE, home=Tier.HOST, planes=["weight"])
    plan = overlap(make_plan(trace, layout=layout, machine=machine, start=start), trace, moments_ahead=None)
    expect_legal(plan, trace, layout, machine)
    assert before_each_moment(plan) == [
        "c0.weight H>D, c1.weight H>D, c0.weight D?", "c0.weight D!", "c0.weight H>D, c1.weight D?", "c0.weight D?",
    ]  # fmt: skip


def on_a_device(start: str, *moments: str, device: int, host: int) -> list[str]:
    """As `overlapped`, on a device over a host over a disk with so many slots; `start`: the lines of a snapshot."""
    state = Residency.of(snapshot(f"on D, slots of {SLOT_BYTES} bytes\n{start}"))
    layout, trace = layout_of(*[1] * 3), trace_of(*moments)
    budget = {Tier.DEVICE: device * SLOT_BYTES, Tier.HOST: host * SLOT_BYTES, Tier.DISK: PLENTY}
    machine = Machine(Tier.DEVICE, budget)
    plan = overlap(make_plan(trace, layout=layout, machine=machine, start=state), trace, moments_ahead=None)
    expect_legal(plan, trace, layout, machine)
    return before_each_moment(plan)


def test_what_was_on_its_way_as_the_plan_began_is_not_dropped_before_it_has_landed() -> None:
    start = "  weight K free 0\n  weight K away,clean:H>D 1\n  weight K dirty,stale 2"
    assert on_a_device(start, "", "", "c0.weight", device=1, host=1) == [
        "c2.weight H!, c1.weight D?, c1.weight H!, c2.weight D>H, c2.weight H?, c2.weight D!",
        "c1.weight D!",
        "c0.weight 0>D",
    ]


def test_what_comes_before_something_else_leaves_has_no_room_beside_what_is_fetched_early() -> None:
    start = "  weight H free 0\n  weight D free 1\n  grad H free 0 1"
    moments = ("c0.weight c1.grad", "c0.grad@H*", "", "c1.grad@H* c1.weight", "c0.grad c0.weight")
    assert on_a_device(start, *moments, device=3, host=9) == [
        "c0.weight 0>D, c1.grad 0>D",
        "c0.grad 0>H, c1.grad D>H",
        "",
        "c1.weight 0>D, c1.grad H?, c1.grad D!",
        "c0.grad H>D, c0.grad D?",
    ]


def by_place(plan: Plan) -> dict[object, list[Action]]:
    """What is done with the bytes of each unit on each tier, in order: copies from there and to there with their waits, creation, updates, drops."""
    found: dict[object, list[Action]] = defaultdict(list)
    copies: dict[object, tuple[Tier | None, Tier]] = dict(plan.start.in_flight)
    for action in plan.actions():
        if isinstance(action, Issue) and is_copy(action):
            copies[action.of] = action.src, action.work.tier
        if isinstance(action, Drop):
            tiers: tuple[Tier | None, ...] = (action.tier,)
        else:
            tiers = copies[action.of] if action.work.kind is WorkKind.COPY else (action.work.tier,)
        for tier in tiers:
            found[action.of, tier].append(action)
    return dict(found)


def expect_the_same_earlier(instance: Instance, policy: str, ahead: int | None) -> None:
    """The same actions are done, at most so many moments earlier, and those about the same bytes in the same order.

    That of one unit's actions on two tiers may change: what the host and the device both have leaves either of them first.
    """
    trace, layout, machine = instance.trace, instance.layout, instance.machine
    plan = instance.planned(policy)
    early = overlap_disk(overlap(plan, trace, moments_ahead=ahead), trace, moments_ahead=ahead)
    expect_legal(early, trace, layout, machine)
    assert Counter(early.actions()) == Counter(plan.actions())
    assert by_place(early) == by_place(plan)
    assert (early.start, early.end, early.frees) == (plan.start, plan.end, plan.frees)
    before, after = (simulate(one, trace) for one in (plan, early))
    assert after.moved == before.moved
    assert all(after.peak[tier.label] <= max(machine.budget[tier], before.peak[tier.label]) for tier in machine.budget)
    for issue, need in zip(_issues(early), _issues(plan), strict=True):
        assert need[1] - (len(trace) if ahead is None else ahead) <= issue[1] <= need[1]
        assert issue[0] == need[0]


def _issues(plan: Plan) -> list[tuple[Action, int]]:
    """Copies with their moments, by unit and in the order of each unit's."""
    found = [(action, index) for index, actions in enumerate(plan.moments) for action in actions if is_copy(action)]
    return sorted(found, key=lambda one: (one[0].of, one[1]))


@settings(max_examples=150, deadline=None)
@given(
    instance=instances() | instances(lower_tiers=True) | tight_instances(),
    policy=st.sampled_from(sorted(POLICIES)),
    ahead=st.none() | st.integers(0, 3),
)
def test_the_same_actions_keep_every_invariant_earlier(instance: Instance, policy: str, ahead: int | None) -> None:
    try:
        expect_the_same_earlier(instance, policy, ahead)
    except BudgetError:
        return


@settings(max_examples=100, deadline=None)
@given(instance=with_host_touches(), ahead=st.none() | st.integers(0, 3))
def test_so_do_those_of_plans_that_use_units_on_the_host(instance: Instance, ahead: int | None) -> None:
    expect_the_same_earlier(instance, "next-use", ahead)


@pytest.mark.parametrize("ahead", [1, 4, None])
def test_a_device_over_a_host_waits_where_it_uses(ahead: int | None) -> None:
    layout = layout_of(*[1] * 8)
    trace = trace_of(*[f"c{chunk}.weight" for chunk in (*range(8), *reversed(range(8)))])
    machine = device_over_host(4)
    start = resting(layout, compute=Tier.DEVICE, home=Tier.HOST, planes=["weight"])
    plan = overlap(make_plan(trace, layout=layout, machine=machine, start=start), trace, moments_ahead=ahead)
    expect_legal(plan, trace, layout, machine)
    waits = {
        action.of: index for index, actions in enumerate(plan.moments) for action in actions if isinstance(action, Wait)
    }
    early = [need - issue for _, issue in _issues(plan) for need in [waits[_.of]]]
    assert max(early) >= 1
