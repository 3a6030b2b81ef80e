"""What may be asked of a loss scale."""

from __future__ import annotations

from typing import Any

import pytest

from patrickstar import ConfigError, LossScale, Options


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"initial": 0}, "initial=0: expected a finite number above 0"),
        ({"initial": float("inf")}, "initial=inf"),
        ({"factor": 1.0}, "factor=1.0: expected a finite number above 1"),
        ({"window": 0}, "window=0: expected a whole number of 1 or more"),
        ({"hysteresis": 1.5}, "hysteresis=1.5"),
        ({"dynamic": 1}, "dynamic=1: expected true or false"),
        ({"initial": 2.0, "minimum": 4.0}, "initial=2.0 is less than minimum=4.0"),
        ({"windw": 3}, 'did you mean "window"'),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        LossScale(**given)
    assert said in str(refusal.value)


def test_every_problem_is_told() -> None:
    with pytest.raises(ConfigError) as refusal:
        LossScale(window=-1, hysteresis=0, minimum=float("nan"))
    assert len(refusal.value.problems) == 3


def test_a_static_scale_may_be_below_the_minimum_of_dynamic_ones() -> None:
    assert LossScale(initial=0.5, dynamic=False).initial == 0.5


def test_options_take_nothing_else() -> None:
    assert Options(loss_scale=LossScale(initial=8)).loss_scale == LossScale(initial=8)
    with pytest.raises(ConfigError, match="loss_scale=128: expected patrickstar.LossScale"):
        Options(loss_scale=128)  # type: ignore[arg-type]
