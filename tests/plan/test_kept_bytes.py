"""`with_kept_bytes` of plan/fit.py: slots have the same room all the time, where moments leave it, and nothing is refused for that."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.machine import Machine
from patrickstar.plan.fit import slots_needed, with_kept_bytes, worst_moment
from patrickstar.plan.make import make_plan
from tests.plan.builders import SLOT_BYTES, Instance, instances, layout_of, resting, some, tight_instances, trace_of

kept_bytes = st.integers(0, 6 * SLOT_BYTES)


def test_the_example_of_the_module() -> None:
    slot, layout = SLOT_BYTES, layout_of(*[1] * 14)
    weights = [f"c{index}.weight" for index in range(14)]
    touched = [" ".join(weights[:count]) for count in (3, 3, 6, 14)]
    trace = trace_of(*touched, nonmodel=[slot, 4 * slot, 9 * slot, 2 * slot])
    kept = with_kept_bytes(trace, kept_bytes=9 * slot, budget_bytes=20 * slot, start=resting(layout))
    assert [moment.nonmodel_bytes for moment in kept.moments] == [9 * slot, 9 * slot, 9 * slot, 6 * slot]


@some
@given(instance=instances(), kept=kept_bytes)
def test_room_for_slots_changes_only_where_a_moment_needs_more(instance: Instance, kept: int) -> None:
    found = with_kept_bytes(instance.trace, kept_bytes=kept, budget_bytes=instance.budget, start=instance.start)
    needed = slots_needed(instance.trace, start=instance.start)
    for after, (before, slots) in zip(found.moments, needed, strict=True):
        assert replace(after, nonmodel_bytes=0, live_bytes=0) == replace(before, nonmodel_bytes=0, live_bytes=0)
        assert after.nonmodel_bytes >= before.nonmodel_bytes
        if after.nonmodel_bytes < kept:
            left = instance.budget - slots * instance.start.slot_bytes
            assert after.nonmodel_bytes == max(before.nonmodel_bytes, left)
        if kept >= instance.trace.peak:
            assert after.nonmodel_bytes <= kept


@some
@given(instance=tight_instances(), kept=kept_bytes)
def test_what_fits_fits_with_bytes_that_are_kept(instance: Instance, kept: int) -> None:
    machine: Machine = instance.machine
    trace = with_kept_bytes(instance.trace, kept_bytes=kept, budget_bytes=instance.budget, start=instance.start)
    assert worst_moment(trace, start=instance.start, frees=instance.frees).nbytes <= instance.budget
    make_plan(trace, layout=instance.layout, machine=machine, start=instance.start, frees=instance.frees)
