"""A plan as people read it."""

from __future__ import annotations

from hypothesis import given

from patrickstar.core.machine import Machine, Tier
from patrickstar.core.trace import Trace
from patrickstar.plan.make import make_plan
from patrickstar.plan.plan import Plan
from patrickstar.plan.render import render
from tests.plan.builders import (
    SLOT_BYTES,
    Instance,
    device_over_host,
    few,
    host_over_disk,
    layout_of,
    resting,
    tight_instances,
    trace_of,
    unit,
)

LAYOUT = layout_of(1, 2, 1)
TRACE = trace_of("c0.weight*", "c1.weight", "c3.weight c0.grad*", "c1.weight", nonmodel=[0, 64, 0, 5])
START = resting(LAYOUT, free=LAYOUT.units(["grad"]))


def told(plan: Plan, trace: Trace, machine: Machine, index: int) -> list[str]:
    """What is told of one moment."""
    line = render(plan, trace, LAYOUT, machine).splitlines()[2 + index]
    return line.partition(" B   ")[2].split(";  ")


def test_a_plan_reads_as_a_line_per_moment_with_reasons() -> None:
    machine = host_over_disk(3)
    plan = make_plan(TRACE, layout=LAYOUT, machine=machine, start=START, frees=[(2, unit("c0.grad"))])
    assert render(plan, TRACE, LAYOUT, machine).splitlines()[:4] == [
        f"plan {plan.digest()} by next-use: 4 moments, host budget 192 B, disk budget 1.00 TiB, slots of 64 B",
        "peak host 192 B, disk 512 B;  moved H>K 64 B, K>H 384 B",
        "0 forward   p0     1 slots +        0 B   fetch c0.weight K>H",
        (
            "1 forward   p1     2 slots +       64 B   "
            "write back c0.weight H>K and drop it (next use 0 moments into the next trace);  fetch c1.weight x2 K>H"
        ),
    ]
    assert told(plan, TRACE, machine, 2) == [
        "drop c1.weight x2 (clean; next use at moment 3)",
        "create c0.grad (zeros)",
        "fetch c3.weight K>H",
    ]
    assert told(plan, TRACE, machine, 3) == [
        "drop c0.grad (its contents are no longer wanted)",
        "drop c3.weight (clean; next use 2 moments into the next trace)",
        "fetch c1.weight x2 K>H",
    ]


def test_a_gradient_that_begins_again_is_told_as_two() -> None:
    machine, trace = host_over_disk(2), trace_of("c0.grad*", "c0.grad*")
    plan = make_plan(trace, layout=LAYOUT, machine=machine, start=START, frees=[(0, unit("c0.grad"))])
    assert told(plan, trace, machine, 1) == [
        "drop c0.grad (its contents are no longer wanted)",
        "create c0.grad (zeros)",
    ]


def test_lru_gives_its_own_reasons() -> None:
    machine = host_over_disk(3)
    plan = make_plan(TRACE, layout=LAYOUT, machine=machine, start=START, policy="lru")
    assert told(plan, TRACE, machine, 2)[0] == "drop c1.weight x2 (clean; last used at moment 1)"


def test_a_transfer_through_the_host_is_told_as_one() -> None:
    start = resting(LAYOUT, compute=Tier.DEVICE)
    machine = Machine(Tier.DEVICE, {**device_over_host(3).budget, Tier.HOST: 2 * SLOT_BYTES})
    plan = make_plan(TRACE, layout=LAYOUT, machine=machine, start=start)
    assert told(plan, TRACE, machine, 1) == [
        "write back c0.weight D>H H>K and drop it (next use 0 moments into the next trace)",
        "fetch c1.weight x2 K>H H>D",
    ]


@few
@given(instance=tight_instances())
def test_every_plan_has_a_line_per_moment_that_names_all_it_moves(instance: Instance) -> None:
    plan = make_plan(instance.trace, following=instance.following, **instance.arguments)
    lines = render(plan, instance.trace, instance.layout, instance.machine, following=instance.following).splitlines()
    assert len(lines) == 2 + len(instance.trace)
    for line, actions in zip(lines[2:], plan.moments, strict=True):
        assert all(f" {action.of}" in line for action in actions)
