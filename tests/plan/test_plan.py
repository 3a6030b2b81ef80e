"""A plan is data a person can read: it prints, and has a digest and a diff."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from patrickstar.plan.make import make_plan
from patrickstar.plan.plan import Condition
from patrickstar.plan.residency import Residency
from tests.plan.builders import Instance, few, host_over_disk, instances, layout_of, resting, state_of, trace_of
from tests.plan.texts import snapshot, unit, units

LAYOUT = layout_of(1, 2)
TRACE = trace_of("c0.weight c0.grad*", "c0.grad", "c1.weight")
PLAN = make_plan(
    TRACE,
    layout=LAYOUT,
    machine=host_over_disk(2),
    start=resting(LAYOUT, free=LAYOUT.units(["grad"])),
    frees=[(1, unit("c0.grad"))],
)


def test_a_plan_prints_as() -> None:
    assert str(PLAN) == (
        "plan of 3 moments by next-use\n"
        f"layout {LAYOUT.digest()}\n"
        "machine H: H=128 K=1099511627776\n"
        "start on H, slots of 64 bytes\n"
        "  grad K free 0-2\n"
        "  weight K away 0 1x2\n"
        "0: c0.grad 0>H, c0.weight K>H, c0.weight H?\n"
        "2: c0.grad H!, c0.weight H!, c1.weight K>H x2, c1.weight H?\n"
        "frees 1: c0.grad\n"
        "end on H, slots of 64 bytes\n"
        "  grad K free 0-2\n"
        "  weight K away 0\n"
        "  weight K clean 1x2"
    )


def test_plans_that_differ_in_one_wait_have_other_digests() -> None:
    other = replace(PLAN, moments=(PLAN.moments[0][:-1], *PLAN.moments[1:]))
    assert other.digest() != PLAN.digest()


@few
@given(instance=instances())
def test_a_snapshot_says_all_and_thaws_to_the_same_state(instance: Instance) -> None:
    found = instance.start.snapshot()
    assert snapshot(str(found)) == found
    assert Residency.of(found) == instance.start


def test_neighbours_of_one_size_share_an_entry() -> None:
    layout = layout_of(1, 1, 3, 1, 1)
    assert str(resting(layout, free=units("c2.grad c3.grad c4.grad")).snapshot()) == (
        "on H, slots of 64 bytes\n  grad K away 0-1 5-6\n  grad K free 2-4\n  weight K away 0-1 2x3 5-6"
    )


def test_every_condition_has_a_name() -> None:
    text = "c0.weight here, c1.weight clean, c2.weight dirty, c3.weight away, c4.weight free, c5.weight void, c6.weight stale"
    found = state_of(text).snapshot()
    assert [found.condition(unit(f"c{chunk}.weight")).value for chunk in range(7)] == [
        word.split()[1] for word in text.split(", ")
    ]
    assert {found.condition(ref) for ref in found.home} == set(Condition)
    assert len(found.taken[found.compute]) == 5


def test_a_snapshot_does_not_change_with_the_state_it_was_taken_of() -> None:
    state = state_of("c0.weight clean")
    found = state.snapshot()
    state.newest.clear()
    state.taken[state.compute].clear()
    assert found.condition(unit("c0.weight")) is Condition.CLEAN
