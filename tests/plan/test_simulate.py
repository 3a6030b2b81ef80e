"""The simulation equals a second derivation, made from nothing but the text of the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.machine import Tier
from patrickstar.plan.make import make_plan
from patrickstar.plan.residency import InvariantError
from patrickstar.plan.simulate import simulate
from tests.plan.builders import (
    SLOT_BYTES,
    Instance,
    device_over_host,
    host_over_disk,
    layout_of,
    resting,
    some,
    tight_instances,
    trace_of,
)
from tests.plan.naive import replay

LAYOUT = layout_of(1, 2)
TRACE = trace_of("c0.weight*", "c1.weight", nonmodel=[1, 2])


@some
@given(instance=tight_instances(), policy=st.sampled_from(["next-use", "lru"]))
def test_peaks_and_moves_are_those_of_a_replay_of_the_text(instance: Instance, policy: str) -> None:
    plan = instance.planned(policy)
    simulation = simulate(plan, instance.trace)
    curve, moves, peaks = replay(plan, instance.machine, instance.trace)
    assert list(simulation.per_moment) == curve
    assert simulation.moved == {link: sum(moved[link] for moved in moves) for link in simulation.moved}
    assert simulation.peak[plan.start.compute.label] == max(curve)
    assert all(simulation.peak[Tier(letter).label] == nbytes for letter, nbytes in peaks.items())
    nonmodel = [moment.nonmodel_bytes for moment in instance.trace.moments]
    assert [n * SLOT_BYTES + rest for n, rest in zip(simulation.slots, nonmodel, strict=True)] == curve


def test_what_passes_through_the_host_counts_there_and_on_both_links() -> None:
    start = resting(LAYOUT, compute=Tier.DEVICE, planes=["weight"])
    trace = trace_of("c0.weight*", "c1.weight")
    plan = make_plan(trace, layout=LAYOUT, machine=device_over_host(2), start=start)
    simulation = simulate(plan, trace)
    assert simulation.peak == {"device": 2 * SLOT_BYTES, "host": 3 * SLOT_BYTES, "disk": 3 * SLOT_BYTES}
    assert simulation.moved == {link: n * SLOT_BYTES for link, n in {"H>D": 3, "D>H": 1, "H>K": 0, "K>H": 3}.items()}


def test_an_illegal_plan_is_not_simulated() -> None:
    plan = make_plan(TRACE, layout=LAYOUT, machine=host_over_disk(2, nonmodel=2), start=resting(LAYOUT))
    spoiled = replace(plan, moments=(plan.moments[0], plan.moments[1][2:]))  # no write-back before the drop
    with pytest.raises(InvariantError, match=r"^\(4\) c0.weight H!"):
        simulate(spoiled, TRACE)
