"""Actions print as one line of text."""

from __future__ import annotations

import pytest

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.plan.actions import Action, Drop, Issue, Wait, Work
from tests.plan import texts


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
    assert texts.action(text) == action


def test_actions_of_different_kinds_are_never_equal() -> None:
    ref = PlaneRef(0, "grad")
    assert len({Drop(ref, Tier.HOST), Issue.create(ref, Tier.HOST), Wait.copy(ref, Tier.HOST)}) == 3
