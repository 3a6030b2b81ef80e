"""A plan is data a person can read: it prints, parses back, has a digest and a diff."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from patrickstar.plan.make import make_plan
from patrickstar.plan.plan import Plan
from tests.plan.builders import (
    Instance,
    few,
    host_over_disk,
    layout_of,
    resting,
    tight_instances,
    trace_of,
    unit,
)

LAYOUT = layout_of(1, 2)
TRACE = trace_of("c0.weight c0.grad*", "c0.grad", "c1.weight")
PLAN = make_plan(
    TRACE,
    layout=LAYOUT,
    machine=host_over_disk(2),
    start=resting(LAYOUT, free=LAYOUT.units(["grad"])),
    frees=[(1, unit("c0.grad"))],
)


@few
@given(instance=tight_instances())
def test_a_plan_parses_back(instance: Instance) -> None:
    plan = make_plan(instance.trace, following=instance.following, **instance.arguments)
    parsed = Plan.parse(str(plan))
    assert parsed == plan
    assert parsed.digest() == plan.digest()
    assert plan.diff(parsed) == []


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


def test_a_diff_names_what_differs() -> None:
    roomier = make_plan(
        TRACE,
        layout=LAYOUT,
        machine=host_over_disk(4),
        start=resting(LAYOUT, free=LAYOUT.units(["grad"])),
        policy="lru",
    )
    assert PLAN.diff(roomier) == [
        "- policy next-use",
        "+ policy lru",
        "- machine H: H=128 K=1099511627776",
        "+ machine H: H=256 K=1099511627776",
        "- moment 2: c0.grad H!, c0.weight H!, c1.weight K>H x2, c1.weight H?",
        "+ moment 2: c1.weight K>H x2, c1.weight H?",
        "- frees c0.grad after 1",
        "+ frees nothing",
        f"- end {PLAN.end}",
        f"+ end {roomier.end}",
    ]


def test_plans_that_differ_in_one_wait_have_other_digests() -> None:
    other = replace(PLAN, moments=(PLAN.moments[0][:-1], *PLAN.moments[1:]))
    assert other.digest() != PLAN.digest()
    assert len(PLAN.diff(other)) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        str(PLAN)[: len(str(PLAN)) // 2],
        str(PLAN).replace("plan of 3", "plan of 2"),
        str(PLAN).replace("c0.grad 0>H", "c0.grad 0>>H"),
        str(PLAN).replace("machine H", "machine X"),
        str(PLAN).replace("weight K clean 1x2", "weight K spoiled 1x2"),
    ],
)
def test_what_is_no_whole_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Plan.parse(text)
