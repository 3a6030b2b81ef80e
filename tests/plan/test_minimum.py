"""The minimum is the minimum: one byte less is refused, and it does not depend on the start."""

from __future__ import annotations

import pytest
from hypothesis import given

from patrickstar.core.formats import FP32
from patrickstar.core.machine import Machine, Tier
from patrickstar.errors import BudgetError
from patrickstar.plan.eviction import POLICIES
from patrickstar.plan.make import make_plan
from patrickstar.plan.minimum import Need, minimum_bytes, pinned_at, worst_moment
from tests.plan.builders import PLENTY, SLOT_BYTES, Instance, few, instances, layout_of, resting, trace_of, unit, units
from tests.plan.naive import needed_bytes


@few
@given(instance=instances())
def test_the_minimum_fits_and_one_byte_less_does_not(instance: Instance) -> None:
    least = worst_moment(instance.trace, start=instance.start, frees=instance.frees).nbytes
    assert least == max(needed_bytes(instance))
    for policy in POLICIES:
        for budget_bytes, fits in ((least, True), (least - 1, False)):
            machine = Machine(instance.start.compute, {**instance.machine.budget, instance.start.compute: budget_bytes})
            arguments = {**instance.arguments, "machine": machine, "policy": policy}
            if fits:
                make_plan(instance.trace, **arguments)
            else:
                with pytest.raises(BudgetError):
                    make_plan(instance.trace, **arguments)


@few
@given(instance=instances())
def test_with_every_home_below_the_start_does_not_matter(instance: Instance) -> None:
    if instance.start.compute not in instance.start.home.values():
        least = worst_moment(instance.trace, start=instance.start).nbytes
        assert minimum_bytes(instance.trace, layout=instance.layout, formats=FP32) == least


def test_the_worst_moment_is_named_with_what_it_holds() -> None:
    layout = layout_of(1, 3, 1)
    trace = trace_of("c0.weight", "c1.weight c1.grad", "c4.weight held c1.weight", nonmodel=[0, 1, 2])
    assert worst_moment(trace, start=resting(layout)) == Need("2 forward p2", 4, SLOT_BYTES, 2)
    assert minimum_bytes(trace, layout=layout, formats=FP32) == 4 * SLOT_BYTES + 2


def test_the_worst_of_several_traces_decides() -> None:
    layout = layout_of(1, 1)
    traces = [trace_of("c0.weight"), trace_of("c0.weight c1.weight"), trace_of("c1.weight", nonmodel=9)]
    assert minimum_bytes(*traces, layout=layout, formats=FP32) == 2 * SLOT_BYTES
    assert minimum_bytes(layout=layout, formats=FP32) == 0


def test_what_is_at_home_on_the_compute_tier_counts_from_its_creation_to_its_end() -> None:
    layout = layout_of(1, 1)
    start = resting(layout, home=Tier.HOST, planes=["grad"], free=layout.units(["grad"]))
    trace = trace_of("c0.grad*", "c0.grad", "c1.grad*")
    assert worst_moment(trace, start=start) == Need("2 forward p2", 2, SLOT_BYTES, 0)
    assert worst_moment(trace, start=start, frees=[(1, unit("c0.grad"))]).slots == 1


def test_touched_and_held_units_count_once() -> None:
    moment = trace_of("c0.weight c1.weight held c1.weight c2.weight").moments[0]
    assert pinned_at(moment) == units("c0.weight c1.weight c2.weight")


def test_the_refusal_names_the_worst_moment_in_numbers_that_add_up() -> None:
    layout = layout_of(1, 3, 1)
    trace = trace_of("c0.weight", "c1.weight c1.grad held c0.weight", nonmodel=[0, 100])
    machine = Machine(Tier.HOST, {Tier.HOST: 5 * SLOT_BYTES, Tier.DISK: PLENTY})
    with pytest.raises(BudgetError) as refused:
        make_plan(trace, layout=layout, machine=machine, start=resting(layout))
    assert str(refused.value) == (
        "host memory is 100 B short at moment 1 forward p1\n"
        "  needed 420 B = chunk slots 320 B (5 of 64 B) + activations 100 B;  budget 320 B\n"
        "  fits with: host_memory >= 420 B"
    )
