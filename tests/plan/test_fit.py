"""The minimum is the minimum: one byte less is refused. What a refusal says adds up, and what it says fits does fit."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.formats import FP32
from patrickstar.core.machine import Machine, Tier
from patrickstar.errors import BudgetError
from patrickstar.plan.eviction import POLICIES
from patrickstar.plan.fit import Need, minimum_bytes, pinned_at, refuse_homes, refuse_moment, within, worst_moment
from patrickstar.plan.make import make_plan
from patrickstar.units import GIB, MIB, parse_size
from tests.plan.builders import SLOT_BYTES, Instance, few, instances, layout_of, resting, some, trace_of
from tests.plan.naive import needed_bytes
from tests.plan.texts import unit, units

sizes = st.integers(0, 1 << 44)


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


def test_after_training_all_that_is_at_home_has_contents_but_gradients() -> None:
    layout = layout_of(1, 1)
    planes = ["weight", "grad", "exp_avg", "exp_avg_sq"]
    start = resting(layout, home=Tier.HOST, planes=planes, free=layout.units(planes))
    trace = trace_of("c0.weight", "c0.weight c1.grad*")
    assert worst_moment(trace, start=start).slots == 2
    assert worst_moment(trace, start=start, trained=True) == Need("1 forward p1", 7, SLOT_BYTES, 0)


@few
@given(instance=instances(), spared=st.integers(0, 3 * SLOT_BYTES))
def test_what_has_run_fits_its_budget_with_no_less_beside_its_chunks_than_there_is_room_for(
    instance: Instance, spared: int
) -> None:
    need = worst_moment(instance.trace, start=instance.start, trained=True)
    slots = max(
        worst_moment(within(instance.trace, 0, start=instance.start), start=instance.start, trained=True).nbytes, 1
    )
    budget = max(slots, need.nbytes - spared)
    found = within(instance.trace, budget, start=instance.start)
    assert worst_moment(found, start=instance.start, trained=True).nbytes == min(need.nbytes, budget)
    assert all(moment.live_bytes <= moment.nonmodel_bytes for moment in found.moments)
    assert within(instance.trace, need.nbytes, start=instance.start) == instance.trace


def test_touched_and_held_units_count_once() -> None:
    moment = trace_of("c0.weight c1.weight held c1.weight c2.weight").moments[0]
    assert pinned_at(moment) == units("c0.weight c1.weight c2.weight")


def printed(text: str, what: str) -> float:
    return float(re.search(rf"{what} ([\d.]+) [KMGT]?i?B", text)[1])


@some
@given(slots=st.integers(1, 10**6), slot_bytes=st.integers(1, 1 << 24), nonmodel=sizes, data=st.data())
def test_the_numbers_of_a_moment_add_up(slots: int, slot_bytes: int, nonmodel: int, data: st.DataObject) -> None:
    needed = slots * slot_bytes + nonmodel
    budget = data.draw(st.integers(0, needed - 1))
    need = Need("118 backward layers.7.mlp.w1", slots, slot_bytes, nonmodel)
    error = refuse_moment(need, tier=Tier.DEVICE, budget_bytes=budget)
    text = str(error)
    total = printed(text, "needed")
    assert round(total - printed(text, "slots") - printed(text, "activations"), 6) == 0
    assert round(total - printed(text, "budget") - printed(text, "is"), 6) == 0
    assert ("activations of at most" in text) == (slots * slot_bytes < budget)
    suggested = re.search(r"device_memory >= ([\d.]+ \w+)", text)[1].replace(" ", "")
    assert parse_size(suggested, name="device_memory") >= needed
    assert (error.needed_bytes, error.available_bytes, error.smallest_bytes) == (needed, budget, needed)


def test_a_moment_that_does_not_fit_reads_as() -> None:
    need = Need("118 backward layers.7.mlp.w1", 1920, 4 * MIB, 23 * GIB // 4)
    error = refuse_moment(need, tier=Tier.DEVICE, budget_bytes=12 * GIB)
    assert str(error) == (
        "device memory is 1.25 GiB short at op 118 backward layers.7.mlp.w1\n"
        "  needed 13.25 GiB = chunk slots 7.50 GiB (1920 of 4.00 MiB) + activations 5.75 GiB;  budget 12.00 GiB\n"
        "  fits with: device_memory >= 13.25 GiB  |  activations of at most 4.50 GiB there: a smaller batch, or activation checkpointing"
    )


@some
@given(parts=st.lists(sizes, min_size=1, max_size=3), data=st.data())
def test_the_numbers_of_a_tier_add_up(parts: list[int], data: st.DataObject) -> None:
    needed = sum(parts)
    budget = data.draw(st.integers(0, needed))
    named = {f"part{chr(97 + i)}": nbytes for i, nbytes in enumerate(parts)}
    error = refuse_homes(tier=Tier.DISK, parts=named, budget_bytes=budget)
    text = str(error)
    assert round(printed(text, "needed") - sum(printed(text, name) for name in named), 6) == 0
    assert round(printed(text, "needed") - printed(text, "budget") - printed(text, "is"), 6) == 0
    assert (error.tier, error.needed_bytes, error.available_bytes) == ("disk", needed, budget)
