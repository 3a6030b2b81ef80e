"""Rows of units that are used where they rest: what must happen before, and that plans and their check agree on it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.machine import Tier
from patrickstar.core.trace import Moment, Rows, Trace
from patrickstar.errors import BudgetError
from patrickstar.plan.check import check
from patrickstar.plan.fit import pinned_at
from patrickstar.plan.make import make_plan
from patrickstar.plan.residency import InvariantError
from patrickstar.plan.rows import prepare_rows, state_after
from patrickstar.plan.simulate import simulate
from tests.plan.builders import (
    Instance,
    device_over_host,
    instances,
    layout_of,
    resting,
    some,
    state_of,
    trace_of,
    unit,
)


def state(text: str):
    return state_of(text, compute=Tier.DEVICE, home=Tier.HOST)


@pytest.mark.parametrize(
    ("condition", "reads", "adds"),
    [
        ("away", "", ""),
        ("clean", "", "c0.grad D!"),
        ("dirty", "c0.grad D>H, c0.grad H?", "c0.grad D>H, c0.grad H?, c0.grad D!"),
        ("free", None, "c0.grad 0>H"),
        ("void", None, "c0.grad D!, c0.grad 0>H"),
    ],
)
def test_what_must_happen_before_rows_are_used(condition: str, reads: str | None, adds: str) -> None:
    for writes, wanted in ((False, reads), (True, adds)):
        before = state(f"c0.grad {condition}")
        rows = Rows((unit("c0.grad"),), 64, writes=writes)
        if wanted is None:
            with pytest.raises(InvariantError, match=r"\(1\) rows of c0\.grad are read, which has no contents"):
                prepare_rows(before, rows)
            continue
        actions = prepare_rows(before, rows)
        assert ", ".join(map(str, actions)) == wanted
        after = state_after(before, actions)
        assert unit("c0.grad") not in after.free
        if writes:
            assert unit("c0.grad") not in after.resident
        assert str(before.snapshot()) == str(state(f"c0.grad {condition}").snapshot())


def test_rows_are_used_on_the_host_below_a_device_alone() -> None:
    for compute, home in ((Tier.HOST, Tier.DISK), (Tier.DEVICE, Tier.DISK)):
        with pytest.raises(InvariantError, match=r"\(9\) rows of c0\.weight are used on the disk"):
            prepare_rows(state_of("c0.weight away", compute=compute, home=home), Rows((unit("c0.weight"),), 64))


def test_a_moment_with_rows_prints_and_parses_back() -> None:
    for rows in (Rows((unit("c0.weight"), unit("c1.weight")), 4096), Rows((unit("c0.grad"),), 64, writes=True)):
        (moment,) = trace_of("c2.weight* held c3.weight").moments
        trace = Trace((replace(moment, rows=rows),))
        assert str(rows) in str(trace)
        assert Trace.parse(str(trace)) == trace


def test_bytes_of_rows_cross_the_link_and_nothing_else_does() -> None:
    layout = layout_of(1, 1)
    read = Moment(*_head(), rows=Rows((unit("c0.weight"), unit("c1.weight")), 96))
    add = Moment(*_head(), rows=Rows((unit("c0.grad"), unit("c1.grad")), 40, writes=True))
    trace, machine = Trace((read, add)), device_over_host(1)
    start = resting(layout, compute=Tier.DEVICE, home=Tier.HOST, free=layout.units(["grad"]))
    plan = make_plan(trace, layout=layout, machine=machine, start=start)
    assert check(plan, trace, layout, machine) == []
    moved = simulate(plan, trace, layout, machine).moved
    assert (moved["H>D"], moved["D>H"]) == (96, 40)
    assert unit("c0.grad") not in plan.end.free
    without = replace(plan, moments=tuple(() for _ in plan.moments))
    assert any("(1)" in found for found in check(without, trace, layout, machine))


def _head():
    (moment,) = trace_of("").moments
    return moment.phase, moment.label, ()


@st.composite
def with_rows(draw: st.DrawFn) -> Instance:
    """Some moments also use rows of units that rest on the host and that nobody else uses then."""
    instance = draw(instances(lower_tiers=True).filter(lambda drawn: drawn.machine.compute is Tier.DEVICE))
    start = instance.start
    at_home = [ref for ref, tier in start.home.items() if tier is Tier.HOST]
    never_free = {ref for ref in at_home if ref not in start.free and ref not in {freed for _, freed in instance.frees}}
    moments = []
    for moment in instance.trace.moments:
        usable = [ref for ref in at_home if ref not in pinned_at(moment)]
        wanted = draw(st.lists(st.sampled_from(usable), max_size=2, unique=True)) if usable else []
        writes = draw(st.booleans())
        if not writes:
            wanted = [ref for ref in wanted if ref in never_free]
        rows = Rows(tuple(sorted(wanted)), draw(st.integers(0, 100)), writes=writes) if wanted else None
        moments.append(replace(moment, rows=rows))
    return replace(instance, trace=Trace(tuple(moments)))


@some
@given(instance=with_rows())
def test_plans_with_rows_keep_every_invariant(instance: Instance) -> None:
    try:
        plan = make_plan(instance.trace, following=instance.following, **instance.arguments)
    except BudgetError:
        return
    assert check(plan, instance.trace, instance.layout, instance.machine) == []
    simulated = simulate(plan, instance.trace, instance.layout, instance.machine)
    rows = [moment.rows for moment in instance.trace.moments if moment.rows is not None]
    assert simulated.moved["D>H"] >= sum(used.nbytes for used in rows if used.writes)
    assert simulated.moved["H>D"] >= sum(used.nbytes for used in rows if not used.writes)
