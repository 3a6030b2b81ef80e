"""Where every unit is, as text."""

from __future__ import annotations

import pytest
from hypothesis import given

from patrickstar.plan.residency import Residency
from patrickstar.plan.snapshot import Condition, Snapshot
from tests.plan.builders import Instance, few, instances, layout_of, resting, state_of, unit, units


@few
@given(instance=instances())
def test_a_snapshot_parses_back_and_thaws_to_the_same_state(instance: Instance) -> None:
    snapshot = instance.start.snapshot()
    assert Snapshot.parse(str(snapshot)) == snapshot
    assert Residency.of(snapshot) == instance.start


def test_neighbours_of_one_size_share_an_entry() -> None:
    layout = layout_of(1, 1, 3, 1, 1)
    assert str(resting(layout, free=units("c2.grad c3.grad c4.grad")).snapshot()) == (
        "on H, slots of 64 bytes\n  grad K away 0-1 5-6\n  grad K free 2-4\n  weight K away 0-1 2x3 5-6"
    )


def test_every_condition_has_a_name() -> None:
    text = "c0.weight here, c1.weight clean, c2.weight dirty, c3.weight away, c4.weight free, c5.weight void"
    snapshot = state_of(text).snapshot()
    assert [snapshot.condition(unit(f"c{chunk}.weight")).value for chunk in range(6)] == [
        word.split()[1] for word in text.split(", ")
    ]
    assert {snapshot.condition(ref) for ref in snapshot.home} == set(Condition)
    assert snapshot.slots_used == 4


@pytest.mark.parametrize(
    "text",
    [
        "slots",
        "on D, slots of 4 bytes\n  weight H away 0-",
        "on D, slots of 4 bytes\n  weight H lost 0",
        "on D, slots of 4 bytes\n  weight H away 0-3\n  weight H free 3",
    ],
)
def test_what_is_no_snapshot_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|is no|stands twice"):
        Snapshot.parse(text)


def test_a_snapshot_does_not_change_with_the_state_it_was_taken_of() -> None:
    state = state_of("c0.weight clean")
    snapshot = state.snapshot()
    state.resident.clear()
    assert snapshot.condition(unit("c0.weight")) is Condition.CLEAN
