"""Transfers between host and disk below a device, at other moments than those that need them."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from patrickstar.core.formats import FP32
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import GRAD
from patrickstar.plan.make import make_plan
from patrickstar.plan.overlap import overlap_disk
from patrickstar.plan.residency import Residency
from patrickstar.plan.touches import gradients_freed, on_tiers
from patrickstar.plan.weave import weave
from tests.plan.builders import (
    PLENTY,
    SLOT_BYTES,
    before_each_moment,
    expect_legal,
    layout_of,
    legal_plan,
    some,
    state_of,
    trace_of,
)
from tests.plan.test_weave import FP32_PLANES, updates_of


def overlapped(
    *moments: str, start: str, host_slots: int, ahead: int | None = None, device_slots: int = 1
) -> list[str]:
    """The actions before each moment, of a plan on a device over a host over a disk, on which everything rests."""
    layout = layout_of(*[1] * 4)
    trace = trace_of(*moments)
    budget = {Tier.DEVICE: device_slots * SLOT_BYTES, Tier.HOST: host_slots * SLOT_BYTES, Tier.DISK: PLENTY}
    machine = Machine(Tier.DEVICE, budget)
    state = state_of(start, compute=Tier.DEVICE, home=Tier.DISK)
    plan = make_plan(trace, layout=layout, machine=machine, start=state)
    early = overlap_disk(plan, trace, moments_ahead=ahead)
    expect_legal(early, trace, layout, machine)
    return before_each_moment(early)


AWAY = "c0.weight away, c1.weight away, c2.weight away"
IN_TURN = ("c0.weight", "c0.weight", "c1.weight", "c1.weight", "c2.weight")


def test_what_rests_on_the_disk_is_read_as_soon_as_the_host_has_slots_for_it() -> None:
    assert overlapped(*IN_TURN, start=AWAY, host_slots=3) == [
        "c0.weight K>H, c0.weight H?, c0.weight H>D, c0.weight D?, c1.weight K>H, c2.weight K>H",
        "",
        "c0.weight D!, c1.weight H?, c1.weight H>D, c1.weight D?",
        "",
        "c1.weight D!, c2.weight H?, c2.weight H>D, c2.weight D?",
    ]


def test_no_more_moments_ahead_than_are_allowed() -> None:
    found = overlapped(*IN_TURN, start=AWAY, host_slots=3, ahead=1)
    assert [moment for moment, actions in enumerate(found) if "K>H" in actions] == [0, 1, 3]
    assert "c2.weight K>H" in overlapped(*IN_TURN, start=AWAY, host_slots=3, ahead=0)[4]


def test_what_leaves_the_host_without_a_transfer_leaves_in_time_for_what_is_read_ahead() -> None:
    assert overlapped(*IN_TURN, start=AWAY, host_slots=1) == [
        "c0.weight K>H, c0.weight H?, c0.weight H>D, c0.weight D?",
        "c0.weight H!, c1.weight K>H",
        "c0.weight D!, c1.weight H?, c1.weight H>D, c1.weight D?",
        "c1.weight H!, c2.weight K>H",
        "c1.weight D!, c2.weight H?, c2.weight H>D, c2.weight D?",
    ]


def test_what_only_the_host_has_is_written_back_after_its_last_use_and_leaves_halfway() -> None:
    moments = ("c0.weight@H*", "c3.weight", "c3.weight", "c3.weight", "c3.weight", "c1.weight@H")
    found = overlapped(*moments, start="c0.weight away,clean, c1.weight away, c3.weight clean", host_slots=1)
    assert found == ["", "c0.weight H>K", "", "c0.weight K?, c0.weight H!, c1.weight K>H", "", "c1.weight H?"]


def test_no_more_is_read_ahead_than_the_host_has_slots_for() -> None:
    moments = ("c3.weight", "c3.weight*", "c1.weight", "c2.weight")
    start = "c1.weight away, c2.weight away, c3.weight clean,clean"
    found = overlapped(*moments, start=start, host_slots=2, device_slots=4)
    reads = [moment for moment, actions in enumerate(found) for action in actions.split(", ") if "K>H" in action]
    assert reads == [0, 2]


def test_what_goes_down_at_the_moment_itself_has_its_slots_there() -> None:
    """The host's only slot is what the unit that leaves the device passes through."""
    start = "c0.weight dirty, c1.weight away, c3.weight clean"
    found = overlapped("c0.weight", "c3.weight", "c1.weight c3.weight", start=start, host_slots=1, device_slots=2)
    assert "c0.weight D>H, c0.weight H?, c0.weight D!, c0.weight H>K" in found[2]
    assert "c1.weight K>H" in found[2]


@some
@given(
    repeats=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    homes=st.lists(st.sampled_from([Tier.HOST, Tier.DISK, Tier.DISK]), min_size=16, max_size=16),
    device_slots=st.integers(3, 8),
    more_slots=st.integers(0, 4),
    ahead=st.none() | st.integers(0, 3),
)
# Two updates under way at once, whose waits come at the moment at which what they have used leaves the host.
@example(
    repeats=[2, 2, 2],
    homes=[{"H": Tier.HOST, "K": Tier.DISK}[home] for home in "KKHKKHHKKHKK"],
    device_slots=6,
    more_slots=0,
    ahead=None,
)
def test_updates_on_the_host_have_what_they_use_until_they_are_over(
    repeats: list[int], homes: list[Tier], device_slots: int, more_slots: int, ahead: int | None
) -> None:
    chunks = range(len(repeats))
    layout = layout_of(*[1] * len(repeats))
    units = list(layout.units(FP32_PLANES))
    state = Residency.at_rest(layout, compute=Tier.DEVICE, home=dict(zip(units, homes, strict=False)), formats=FP32)
    forward = [f"c{chunk}.weight" for chunk in chunks for _ in range(repeats[chunk])]
    backward = [text for chunk in reversed(chunks) for text in (f"c{chunk}.weight", f"c{chunk}.weight c{chunk}.grad*")]
    updates = on_tiers(updates_of(layout), dict.fromkeys(chunks, Tier.HOST))
    trace = weave(trace_of(*forward, *backward), updates, state=state, capacity_bytes=device_slots * SLOT_BYTES)
    host_slots = state.slots_resting[Tier.HOST] + len(FP32_PLANES) + more_slots
    budget = {Tier.DEVICE: device_slots * SLOT_BYTES, Tier.HOST: host_slots * SLOT_BYTES, Tier.DISK: PLENTY}
    machine, frees = Machine(Tier.DEVICE, budget), gradients_freed(trace)
    goes_down = [ref for ref in units if ref.plane == GRAD]
    for _ in range(4):
        plan = legal_plan(
            trace, layout=layout, machine=machine, start=state, frees=frees, prefetch=ahead, goes_down=goes_down
        )
        state = Residency.of(plan.end)
