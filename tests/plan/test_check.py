"""Each invariant is found broken in plans that break it, under its number."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.machine import Machine, Tier
from patrickstar.core.trace import Trace
from patrickstar.plan.actions import Action, Drop, Wait, is_copy
from patrickstar.plan.check import check
from patrickstar.plan.make import make_plan
from patrickstar.plan.plan import Plan
from tests.plan import texts
from tests.plan.builders import (
    SLOT_BYTES,
    Instance,
    before_each_moment,
    device_over_host,
    few,
    host_over_disk,
    layout_of,
    resting,
    tight_instances,
    trace_of,
)
from tests.plan.texts import unit

LAYOUT = layout_of(1, 1, 1)
TRACE = trace_of("c0.weight*", "c1.weight held c0.weight", "c2.weight", "c0.weight", "c1.weight")
MACHINE = host_over_disk(2)


def plan_of(trace: Trace = TRACE, machine: Machine = MACHINE) -> Plan:
    start = resting(LAYOUT, compute=machine.compute, planes=("weight", "grad"), free=LAYOUT.units(["grad"]))
    return make_plan(trace, layout=LAYOUT, machine=machine, start=start)


def with_moments(plan: Plan, **moments: str) -> Plan:
    """The plan with the actions of some moments replaced: `m2="c0.weight H!"`."""
    actions = list(plan.moments)
    for name, text in moments.items():
        actions[int(name[1:])] = tuple(map(texts.action, filter(None, text.split(", "))))
    return replace(plan, moments=tuple(actions))


def violations(plan: Plan, trace: Trace = TRACE, machine: Machine = MACHINE) -> list[str]:
    return check(plan, trace, LAYOUT, machine)


def numbers(found: list[str]) -> set[int]:
    return {int(re.match(r"\((\d+)\) ", text)[1]) for text in found}


def test_the_plan_that_is_spoiled_below_keeps_all_invariants() -> None:
    plan = plan_of()
    assert before_each_moment(plan) == [
        "c0.weight K>H, c0.weight H?",
        "c1.weight K>H, c1.weight H?",
        "c1.weight H!, c2.weight K>H, c2.weight H?",
        "",
        "c2.weight H!, c1.weight K>H, c1.weight H?",
    ]
    assert violations(plan) == []


FETCH_1, FETCH_2 = "c1.weight K>H, c1.weight H?", "c2.weight K>H, c2.weight H?"
SPOILED: dict[str, tuple[dict[str, str], str | set[int] | list[int]]] = {
    "1 one unit of a moment is forgotten": (
        {"m1": ""},
        "(1) moment 1 forward p1: c1.weight is used but is not on the host",
    ),
    # Dropped and fetched again after it was written, without having been written back.
    "1 contents older than the last write": (
        {"m2": f"c1.weight H!, c0.weight H!, c0.weight K>H, c0.weight H?, {FETCH_2}"},
        "(1) moment 3 forward p3: c0.weight is used but the host holds older contents",
    ),
    "2 a drop that is missing overfills the tier": (
        {"m2": FETCH_2},
        "(2) moment 2 forward p2: the host holds 192 bytes of chunks and 0 others; budget 128",
    ),
    "2 slots are given back after others are taken": ({"m2": f"{FETCH_2}, c1.weight H!"}, {2}),
    "2 slots are given back twice": ({"m3": "c1.weight H!"}, [2]),
    "3 a held unit is moved": ({"m1": f"c0.weight H>K, c0.weight K?, {FETCH_1}"}, [3]),
    "3 a held unit is dropped": ({"m1": f"c0.weight H!, {FETCH_1}"}, [3]),
    "4 a dirty copy is dropped without write-back": (
        {"m2": f"c0.weight H!, {FETCH_2}"},
        "(4) moment 2 forward p2: c0.weight H!: it is the last valid copy",
    ),
    "4 a write-back is only issued": ({"m2": f"c0.weight H>K, c0.weight H!, c0.weight K?, {FETCH_2}"}, [4, 5]),
    "5 a wait is dropped": (
        {"m1": "c1.weight K>H"},
        "(5) moment 1 forward p1: c1.weight is used before the wait for its transfer",
    ),
    "5 a wait comes after the use": ({"m1": "c1.weight K>H", "m2": f"c1.weight H?, c1.weight H!, {FETCH_2}"}, {1, 5}),
    "5 the last transfer is never waited for": (
        {"m4": f"c2.weight H!, {FETCH_1}, c0.weight H>K"},
        "(5) the end: the transfer of c0.weight to the disk was never waited for",
    ),
    "5 slots that a transfer still reads are given back": (
        {"m2": f"c1.weight H!, c0.weight H>K, c0.weight H!, c0.weight K?, {FETCH_2}"},
        "(5) moment 2 forward p2: c0.weight H!: a transfer still uses these slots",
    ),
    "7 a copy carries more than its unit": ({"m1": "c1.weight K>H x2, c1.weight H?"}, [7]),
}
"""Actions in place of a moment's; and what is said, the rules that are broken, or some of them."""


@pytest.mark.parametrize(("moments", "broken"), SPOILED.values(), ids=SPOILED)
def test_a_plan_that_is_spoiled_breaks_a_rule(moments: dict[str, str], broken: str | set[int] | list[int]) -> None:
    found = violations(with_moments(plan_of(), **moments))
    match broken:
        case str():
            assert broken in found
        case set():
            assert numbers(found) == broken
        case _:
            assert numbers(found) >= set(broken)


def test_1_a_held_unit_must_be_there_as_well() -> None:
    trace = trace_of("c0.weight", "held c1.weight")
    assert numbers(violations(with_moments(plan_of(trace), m1=""), trace)) == {1, 9}


def test_2_nonmodel_bytes_count() -> None:
    trace = trace_of(*map(str.strip, _lines(TRACE)), nonmodel=[0, 0, 1, 0, 0])
    assert numbers(violations(plan_of(), trace)) == {2}


def test_2_homes_and_staging_count_on_the_tiers_below() -> None:
    assert numbers(violations(plan_of(), machine=Machine(Tier.HOST, {Tier.HOST: 2 * SLOT_BYTES, Tier.DISK: 1}))) == {2}
    staged = plan_of(machine=device_over_host(2))
    small = Machine(Tier.DEVICE, {Tier.DEVICE: 2 * SLOT_BYTES, Tier.HOST: SLOT_BYTES - 1, Tier.DISK: 1 << 20})
    assert numbers(violations(staged, machine=small)) == {2}


def test_5_a_unit_is_written_while_a_transfer_reads_it() -> None:
    trace = trace_of("c0.weight*", "c1.weight", "c0.weight*")
    spoiled = with_moments(plan_of(trace), m1="c0.weight H>K, c1.weight K>H, c1.weight H?", m2="")
    assert "(5) moment 2 forward p2: c0.weight is written while a transfer reads it" in violations(spoiled, trace)


def test_6_what_is_no_action_of_one_rank_is_refused() -> None:
    @dataclass(frozen=True)
    class Gather:
        ref = unit("c0.weight")
        slots = 1

    plan = plan_of()
    spoiled = replace(plan, moments=((*plan.moments[0], Gather()), *plan.moments[1:]))
    assert numbers(violations(spoiled)) == {6}


def test_8_a_gradient_is_not_begun_again_while_it_has_contents() -> None:
    trace = trace_of("c0.grad*", "c1.weight", "c0.grad*")
    spoiled = with_moments(
        plan_of(trace), m1="c0.grad H>K, c0.grad K?, c0.grad H!, c1.weight K>H, c1.weight H?", m2="c0.grad 0>H"
    )
    assert numbers(violations(spoiled, trace)) == {8}


def test_9_the_end_is_where_the_actions_lead() -> None:
    plan = plan_of()
    assert numbers(violations(replace(plan, end=plan.start))) == {9}


def test_9_what_is_left_on_the_host_is_written_down() -> None:
    machine = device_over_host(2)
    plan = plan_of(machine=machine)
    spoiled = with_moments(plan, m4=", ".join(map(str, [*plan.moments[4], "c1.weight H!"])))
    assert violations(spoiled, machine=machine) == [
        "(9) the end: the last contents of c1.weight are on the device and the disk, the plan says the device and the disk and the host",
        "(9) the end: c1.weight has slots on the device, the plan says the device and the host",
    ]


def test_9_a_plan_is_for_one_layout_and_one_trace() -> None:
    plan = plan_of()
    assert numbers(violations(replace(plan, layout="another"))) == {9}
    assert numbers(violations(plan, trace_of(*_lines(TRACE), "c1.weight"))) == {9}


def _lines(trace: Trace) -> list[str]:
    return [str(moment).split(" ", 3)[3] for moment in trace.moments]


@few
@given(instance=tight_instances(), data=st.data())
def test_no_action_of_a_plan_can_be_left_out(instance: Instance, data: st.DataObject) -> None:
    plan = instance.planned()
    actions = list(plan.actions())
    number = data.draw(st.integers(0, len(actions) - 1)) if actions else -1
    position = count()
    kept = tuple(tuple(action for action in moment if next(position) != number) for moment in plan.moments)
    found = check(replace(plan, moments=kept), instance.trace, instance.layout, instance.machine)
    assert numbers(found) & _wrong_without(actions[number]) if actions else not found


def _wrong_without(action: Action) -> set[int]:
    if isinstance(action, Drop):
        return {2, 5, 9}
    return {5} if isinstance(action, Wait) or is_copy(action) else {1, 2, 4, 9}
