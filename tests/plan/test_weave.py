"""Updates between the moments of a forward: each once, before what needs it, and never where they would take room that there is not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.formats import FP32
from patrickstar.core.layout import Layout
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, STEP, WEIGHT, PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.plan.actions import Action, Issue, Wait, WorkKind
from patrickstar.plan.check import check
from patrickstar.plan.fit import worst_moment
from patrickstar.plan.make import make_plan
from patrickstar.plan.plan import Plan
from patrickstar.plan.residency import Residency
from patrickstar.plan.touches import gradients_freed, on_tiers, step_trace
from patrickstar.plan.weave import needs_before, own_moments, weave
from tests.plan import texts
from tests.plan.builders import (
    PLENTY,
    SLOT_BYTES,
    before_each_moment,
    expect_legal,
    layout_of,
    legal_plan,
    resting,
    some,
    trace_of,
)

Woven = tuple[Layout, Machine, Residency, Trace, Trace]
FP32_PLANES = (WEIGHT, GRAD, EXP_AVG, EXP_AVG_SQ)


at_rest = partial(resting, planes=FP32_PLANES)


def on_a_device(*sizes: int, slots: int = 9) -> tuple[Layout, Machine, Residency]:
    """A device with so many slots over a host where everything rests."""
    layout = layout_of(*sizes)
    machine = Machine(Tier.DEVICE, {Tier.DEVICE: slots * SLOT_BYTES, Tier.HOST: PLENTY})
    return layout, machine, at_rest(layout, compute=Tier.DEVICE, home=Tier.HOST)


def updates_of(layout: Layout, names: Iterable[str] | None = None) -> Trace:
    return step_trace(layout, layout.slices if names is None else names, formats=FP32, in_plane=True)


def woven(*moments: str, slots: int = 100, nonmodel: int | list[int] = 0, units: int = 4, names: str = "") -> list[str]:
    """The order of a forward's moments, by what they touch, and of updates, as `u0`."""
    layout = layout_of(*[1] * units)
    trace = trace_of(*moments, nonmodel=nonmodel)
    updates = updates_of(layout, names.split() or None)
    found = weave(trace, updates, state=at_rest(layout), capacity_bytes=slots * SLOT_BYTES)
    return [
        f"u{moment.updates}" if moment.updates is not None else " ".join(map(str, moment.touches))
        for moment in found.moments
    ]


def test_each_update_comes_before_the_first_moment_that_needs_it() -> None:
    assert woven("c1.weight", "c0.weight", "c1.weight", "c2.weight c3.weight") == [
        *("u1", "c1.weight", "u0", "c0.weight", "c1.weight", "u2", "u3", "c2.weight c3.weight")
    ]


def test_what_the_forward_does_not_need_comes_before_its_last_moment() -> None:
    assert woven("c0.weight", "c1.weight", "c0.weight", names="p0 p3") == [
        *("u0", "c0.weight", "c1.weight", "u3", "c0.weight")
    ]


def test_a_gradient_that_is_read_needs_no_update_and_one_that_is_written_does() -> None:
    assert woven("c0.grad", "c0.grad*", names="p0") == ["c0.grad", "u0", "c0.grad*"]
    assert [needs_before(texts.touch(text)) for text in ("c0.grad", "c0.grad*", "c0.weight")] == [False, True, True]


def test_an_update_that_does_not_fit_beside_what_is_alive_later_comes_before_all_that() -> None:
    few_bytes = [0, 0, 2 * SLOT_BYTES]
    moments = "c0.weight", "c1.weight", "c2.weight"
    assert woven(*moments, slots=6, nonmodel=few_bytes, names="p1")[:2] == ["c0.weight", "u1"]
    assert woven(*moments, slots=5, nonmodel=few_bytes, names="p1")[:2] == ["u1", "c0.weight"]


def test_what_is_alive_and_held_when_an_update_comes_is_so_meanwhile() -> None:
    layout = layout_of(1, 1)
    first, second = (
        Moment(Phase.FORWARD, "p0", (Touch(PlaneRef(0, "weight")),), nonmodel_bytes=9),
        Moment(Phase.FORWARD, "p1", (Touch(PlaneRef(1, "weight")),), (PlaneRef(0, "weight"),), 7, 5),
    )
    found = weave(Trace((first, second)), updates_of(layout, ["p1"]), state=at_rest(layout), capacity_bytes=PLENTY)
    assert (found.moments[1].updates, found.moments[1].held) == (1, (PlaneRef(0, "weight"),))
    assert (found.moments[1].nonmodel_bytes, found.moments[1].live_bytes) == (5, 5)
    assert own_moments(found) == [0, 2]


@st.composite
def woven_instances(draw: st.DrawFn) -> Woven:
    """A layout of runs, a machine, a state, a forward with its backward, and updates of some parameters."""
    layout = layout_of(*draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    heads = [run.head for run in layout.runs]
    used = draw(st.lists(st.lists(st.sampled_from(heads), min_size=1, max_size=2, unique=True), min_size=1, max_size=8))
    live = draw(st.lists(st.integers(0, 4), min_size=len(used), max_size=len(used)))
    forward = [
        Moment(
            Phase.FORWARD,
            f"p{index}",
            tuple(Touch(PlaneRef(head, "weight")) for head in refs),
            nonmodel_bytes=before + SLOT_BYTES,
            live_bytes=before,
        )
        for index, (refs, before) in enumerate(zip(used, (size * SLOT_BYTES // 2 for size in live), strict=True))
    ]
    backward = [
        Moment(Phase.BACKWARD, "p", (Touch(PlaneRef(chunk, "grad"), True),))
        for chunk in reversed(range(layout.n_chunks))
    ]
    names = draw(st.lists(st.sampled_from(sorted(layout.slices)), min_size=1, unique=True))
    trace, updates = Trace((*forward, *backward)), updates_of(layout, names)
    compute, home = draw(st.sampled_from([(Tier.HOST, Tier.DISK), (Tier.DEVICE, Tier.HOST)]))
    state = at_rest(layout, compute=compute, home=home)
    need = max(worst_moment(one, start=state).nbytes for one in (trace, updates))
    budget = need + draw(st.integers(0, 6)) * SLOT_BYTES
    machine = Machine(compute, {**dict.fromkeys((Tier.HOST, Tier.DISK), PLENTY), compute: budget})
    return layout, machine, state, trace, updates


def planned(instance: Woven, prefetch: int | None) -> tuple[Plan, Trace]:
    layout, machine, state, trace, updates = instance
    found = weave(trace, updates, state=state, capacity_bytes=machine.budget[state.compute])
    frees = gradients_freed(found)
    return make_plan(found, layout=layout, machine=machine, start=state, frees=frees, prefetch=prefetch), found


@given(woven_instances())
def test_each_update_is_there_once_before_it_is_needed_and_takes_no_more_room_than_before(instance: Woven) -> None:
    _, machine, state, trace, updates = instance
    found = weave(trace, updates, state=state, capacity_bytes=machine.budget[state.compute])
    assert [moment for moment in found.moments if moment.updates is None] == list(trace.moments)
    assert [found.moments[index] for index in own_moments(found)] == list(trace.moments)
    begun = sorted(moment.updates for moment in found.moments if moment.updates is not None)
    assert begun == sorted(moment.updates for moment in updates.moments if moment.updates is not None)
    done = set[PlaneRef]()
    waiting = {touch.ref for moment in updates.moments for touch in moment.touches if touch.ref.plane != "weight"}
    for moment in found.moments:
        if moment.updates is not None:
            done |= {touch.ref for touch in moment.touches}
        else:
            assert not {touch.ref for touch in moment.touches if needs_before(touch)} & waiting - done
    need = max(worst_moment(one, start=state).nbytes for one in (trace, updates))
    assert worst_moment(found, start=state).nbytes <= max(need, machine.budget[state.compute])


@some
@given(woven_instances(), st.sampled_from([None, 0, 1, 3]))
def test_the_plan_of_what_is_woven_keeps_every_invariant(instance: Woven, prefetch: int | None) -> None:
    plan, trace = planned(instance, prefetch)
    expect_legal(plan, trace, instance[0], instance[1])
    for index, actions in enumerate(plan.moments):
        for action in actions:
            if isinstance(action, Wait) and action.work.kind is WorkKind.UPDATE:
                assert index - _moment_of(action.of.chunk, trace) <= (len(trace) if prefetch is None else prefetch)


def _moment_of(chunk: int, trace: Trace) -> int:
    return next(index for index, moment in enumerate(trace.moments) if moment.updates == chunk)


def without(plan: Plan, unwanted: Action) -> Plan:
    moments = (tuple(action for action in actions if action != unwanted) for actions in plan.moments)
    return replace(plan, moments=tuple(moments))


@some
@given(woven_instances(), st.sampled_from([None, 0, 1]), st.data())
def test_no_update_and_no_wait_for_one_can_be_left_out_doubled_or_late(
    instance: Woven, prefetch: int | None, data: st.DataObject
) -> None:
    plan, trace = planned(instance, prefetch)
    action = data.draw(st.sampled_from([one for one in plan.actions() if one.of.plane == STEP]))
    spoiled = without(plan, action)
    numbers = {violation[:4] for violation in check(spoiled, trace, instance[0], instance[1])}
    assert "(10)" in numbers
    at = next(index for index, actions in enumerate(plan.moments) if action in actions)
    doubled = replace(plan, moments=(*plan.moments[:at], (*plan.moments[at], action), *plan.moments[at + 1 :]))
    assert any(violation.startswith("(10)") for violation in check(doubled, trace, instance[0], instance[1]))
    if isinstance(action, Issue) and at + 1 < len(plan.moments):
        late = replace(
            spoiled,
            moments=(*spoiled.moments[: at + 1], (action, *spoiled.moments[at + 1]), *spoiled.moments[at + 2 :]),
        )
        assert any(violation.startswith("(10)") for violation in check(late, trace, instance[0], instance[1]))


def after_an_update(*moments: str) -> tuple[Plan, Trace, Layout, Machine]:
    """A plan of these moments after the update of `p0`, whose gradient stays."""
    layout = layout_of(1, 1)
    machine = Machine(Tier.HOST, {Tier.HOST: 20 * SLOT_BYTES, Tier.DISK: PLENTY})
    trace = Trace((*updates_of(layout, ["p0"]).moments, *trace_of(*moments).moments))
    plan = legal_plan(trace, layout=layout, machine=machine, start=at_rest(layout), prefetch=None)
    return plan, trace, layout, machine


def wait_of(plan: Plan) -> int:
    return next(index for index, actions in enumerate(plan.moments) if "c0 step@H?" in map(str, actions))


@pytest.mark.parametrize("text", ["c0.weight", "c0.grad"])
def test_a_unit_that_is_used_is_updated_by_then(text: str) -> None:
    assert wait_of(after_an_update("c1.weight", "c1.weight", text, "c1.weight")[0]) == 3


def test_a_unit_that_is_held_is_updated_by_then() -> None:
    assert wait_of(after_an_update("c1.weight", "c1.weight held c0.weight", "c1.weight")[0]) == 2


def test_an_update_that_nobody_waits_for_is_noticed_at_the_end() -> None:
    plan, trace, layout, machine = after_an_update("c1.weight", "c1.weight")
    assert wait_of(plan) == 2
    found = check(without(plan, texts.action("c0 step@H?")), trace, layout, machine)
    assert "(10) the end: the update of c0 was never waited for" in found


@pytest.mark.parametrize("early", ["c0.weight H!", "c0.exp_avg H!", "c0.grad H!", "c0.exp_avg H>K, c0.exp_avg K?"])
def test_what_an_update_uses_neither_goes_nor_lands_before_its_wait(early: str) -> None:
    plan, trace, layout, machine = after_an_update("c1.weight", "c1.weight")
    assert wait_of(plan) == 2
    moments = list(plan.moments)
    moments[1] = (*map(texts.action, early.split(", ")), *moments[1])
    found = check(replace(plan, moments=tuple(moments)), trace, layout, machine)
    assert any(violation.startswith("(10) moment 1") for violation in found), found


def on_host(*moments: str, ahead: int | None = None) -> list[str]:
    """The actions before each moment of a device over a host, after a gradient has been written there, of which an update is on the host."""
    layout, machine, state = on_a_device(1, 1)
    update = on_tiers(updates_of(layout, ["p0"]), {0: Tier.HOST}).moments
    trace = Trace((*trace_of(*moments).moments, *update, *trace_of("c0.weight").moments))
    plan = legal_plan(trace, layout=layout, machine=machine, start=state, prefetch=ahead)
    return before_each_moment(plan)


def test_a_gradient_goes_down_early_and_not_before_it_is_complete() -> None:
    moments = "c0.grad*", "c1.weight", "c0.grad*", "c1.weight"
    assert on_host(*moments, ahead=0)[4] == "c0.grad D>H, c0.grad H?, c0 step@H, c0 step@H?"
    plan = on_host(*moments)
    assert ["c0.grad D>H" in actions for actions in plan] == [False, False, False, True, False, False]
    assert plan[4] == "c0 step@H"
    assert plan[5] == "c0 step@H?, c0.weight H>D, c0.weight D?"


@pytest.mark.parametrize(("slots", "at"), [(9, 6), (3, 3)])
def test_slots_of_a_gradient_go_when_its_update_is_over_if_nothing_needs_them_before(slots: int, at: int) -> None:
    layout, machine, state = on_a_device(1, 1, 1, slots=slots)
    update = on_tiers(updates_of(layout, ["p0"]), {0: Tier.HOST}).moments
    before, after = trace_of("c0.grad*", "c1.weight"), trace_of("c1.weight", "c2.weight", "c1.weight", "c0.weight")
    trace = Trace((*before.moments, *update, *after.moments))
    gradient = PlaneRef(0, GRAD)
    plan = make_plan(trace, layout=layout, machine=machine, start=state, prefetch=None, frees=[(len(before), gradient)])
    expect_legal(plan, trace, layout, machine)
    ends = {str(action): index for index, actions in enumerate(plan.moments) for action in actions}
    assert ends["c0.grad D!"] >= ends["c0 step@H?"]
    assert ends["c0 step@H?"] == at


def test_updates_of_a_run_do_not_wait_for_each_other() -> None:
    layout, machine, state = on_a_device(3, 1, slots=12)
    updates = on_tiers(updates_of(layout, ["p0"]), dict.fromkeys(range(3), Tier.HOST))
    grads = trace_of("c0.grad* c1.grad* c2.grad*", "c3.weight")
    trace = Trace((*grads.moments, *updates.moments, *trace_of("c3.weight", "c0.weight").moments))
    frees = [(len(grads) + chunk, PlaneRef(chunk, GRAD)) for chunk in range(3)]
    plan = legal_plan(trace, layout=layout, machine=machine, start=state, prefetch=None, frees=frees)
    *_, before, last = (list(map(str, actions)) for actions in plan.moments)
    assert {f"c{chunk} step@H?" for chunk in range(3)} <= set(last)
    assert "c0.weight H>D x3" in before
    assert not any("?" in str(action) for actions in plan.moments[2:5] for action in actions)


@pytest.mark.parametrize(("ahead", "at"), [(None, 1), (2, 2), (1, 3), (0, None)])
def test_a_gradient_that_will_be_used_below_begins_to_go_there_before_the_end(
    ahead: int | None, at: int | None
) -> None:
    layout, machine, state = on_a_device(1, 1)
    trace, gradient = trace_of("c0.grad*", "c1.weight", "c1.weight", "c0.weight"), PlaneRef(0, GRAD)
    plan = legal_plan(trace, layout=layout, machine=machine, start=state, prefetch=ahead, goes_down=[gradient])
    issued = [index for index, actions in enumerate(plan.moments) if "c0.grad D>H" in map(str, actions)]
    assert issued == ([] if at is None else [at])
    assert dict(plan.end.in_flight) == ({} if at is None else {gradient: (Tier.DEVICE, Tier.HOST)})


def test_what_is_held_until_the_end_does_not_begin_to_go_down() -> None:
    layout, machine, state = on_a_device(1, 1)
    trace, gradient = trace_of("c0.grad*", "c1.weight held c0.grad"), PlaneRef(0, GRAD)
    plan = legal_plan(trace, layout=layout, machine=machine, start=state, prefetch=None, goes_down=[gradient])
    assert not plan.end.in_flight


def test_a_gradient_on_its_way_has_the_last_contents() -> None:
    layout, machine, state = on_a_device(1, 1)
    update = on_tiers(updates_of(layout, ["p0"]), {0: Tier.HOST}).moments
    trace = Trace((*trace_of("c0.grad*", "c0.grad*").moments, *update, *trace_of("c1.weight").moments))
    plan = legal_plan(trace, layout=layout, machine=machine, start=state, prefetch=None)
    down = texts.action("c0.grad D>H")
    early = without(plan, down)
    early = replace(early, moments=(early.moments[0], (down, *early.moments[1]), *early.moments[2:]))
    found = check(early, trace, layout, machine)
    assert any("c0.grad is used but older contents are on their way to the host" in text for text in found), found


def test_what_is_updated_elsewhere_comes_two_updates_before_its_time() -> None:
    layout = layout_of(1, 1, 1, 1)
    trace = trace_of("c0.weight", "c1.weight", "c2.weight", "c3.weight")
    updates = on_tiers(updates_of(layout), dict.fromkeys(range(4), Tier.HOST))
    state = at_rest(layout, compute=Tier.DEVICE, home=Tier.HOST)
    found = weave(trace, updates, state=state, capacity_bytes=SLOT_BYTES)
    assert [moment.updates for moment in found.moments] == [0, 1, 2, None, 3, None, None, None]


@pytest.mark.parametrize(("slots", "kept"), [(9, 12), (4, 0), (5, 12)])
def test_before_the_first_moment_there_is_what_kernels_keep_as_far_as_there_is_room(slots: int, kept: int) -> None:
    layout = layout_of(1, 1)
    trace, updates, state = trace_of("c0.weight", "c1.weight"), updates_of(layout, ["p0"]), at_rest(layout)
    found = weave(trace, updates, state=state, capacity_bytes=slots * SLOT_BYTES, kept_bytes=12)
    assert (found.moments[0].updates, found.moments[0].nonmodel_bytes, found.moments[0].live_bytes) == (0, kept, kept)
