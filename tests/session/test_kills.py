"""Ranks that are killed at any moment of training and saving leave a complete checkpoint; `make torture` has more of them."""

from __future__ import annotations

import pytest

from tests.session.kills import draw, kill_and_load, main, undisturbed


@pytest.mark.slow
def test_the_newest_complete_checkpoint_loads_whenever_ranks_are_killed() -> None:
    want, events = undisturbed()
    for victim, at, kills_all in draw(9, 5, events):
        kill_and_load(want, victim, at, kills_all)


@pytest.mark.campaign
def test_fifty_kills() -> None:
    main(0, 50)
