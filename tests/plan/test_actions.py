"""Actions print as one line of text, and parse back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.plan.actions import Action, Drop, Issue, Wait, Work, parse_action
from tests.plan.builders import some

refs = st.builds(PlaneRef, st.integers(0, 10**6), st.sampled_from(["weight", "grad", "exp_avg", "exp_avg_sq", "rest"]))
tiers = st.sampled_from(Tier)
slots = st.integers(1, 1000)
actions = st.one_of(
    st.builds(Issue.copy, refs, tiers, tiers, slots),
    st.builds(Wait.copy, refs, tiers),
    st.builds(Drop, refs, tiers, slots),
    st.builds(Issue.create, refs, tiers, slots),
    st.builds(Issue.update, st.integers(0, 99), tiers),
    st.builds(lambda chunk, tier: Wait(Work.update(chunk, tier)), st.integers(0, 99), tiers),
)


@some
@given(action=actions)
def test_every_action_parses_back(action: Action) -> None:
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Issue.copy(PlaneRef(12, "weight"), Tier.HOST, Tier.DEVICE, 4), "c12.weight H>D x4"),
        (Issue.copy(PlaneRef(12, "weight"), Tier.DEVICE, Tier.HOST), "c12.weight D>H"),
        (Wait.copy(PlaneRef(12, "weight"), Tier.DEVICE), "c12.weight D?"),
        (Drop(PlaneRef(3, "weight"), Tier.DEVICE), "c3.weight D!"),
        (Issue.create(PlaneRef(3, "exp_avg"), Tier.DEVICE), "c3.exp_avg 0>D"),
        (Issue.update(3, Tier.HOST), "c3 step@H"),
        (Wait(Work.update(3, Tier.HOST)), "c3 step@H?"),
    ],
)
def test_an_action_prints_as(action: Action, text: str) -> None:
    assert str(action) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "c3.weight",
        "c3.weight X>D",
        "c3.weight D>0",
        "c3.weight D? x2",
        "c3.weight D! x0",
        "c3.weight D! x1",
        "w D!",
        "c3 step",
        "c3 step@X",
        "c3.weight step@H",
    ],
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_action(text)


def test_actions_of_different_kinds_are_never_equal() -> None:
    ref = PlaneRef(0, "grad")
    assert len({Drop(ref, Tier.HOST), Issue.create(ref, Tier.HOST), Wait.copy(ref, Tier.HOST)}) == 3
