"""The rule of the loss scale, against one that looks at the whole history at every step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from patrickstar import LossScale
from patrickstar.optim.scale_rule import ScaleRule

histories = st.lists(st.booleans(), max_size=60)
scales = st.builds(
    LossScale,
    initial=st.sampled_from([1.0, 8.0, 2.0**16]),
    window=st.integers(1, 5),
    factor=st.sampled_from([2.0, 4.0]),
    hysteresis=st.integers(1, 4),
    consecutive_hysteresis=st.booleans(),
    minimum=st.sampled_from([0.25, 1.0]),
)


def by_history(options: LossScale, history: list[bool]) -> float:
    """The scale after a history of overflows: each event is decided from what came before it."""
    scale = options.initial
    for now, overflowed in enumerate(history):
        before = history[:now]
        good = 0
        for past in reversed(before):
            if past:
                break
            good += 1
        if not overflowed:
            if (good + 1) % options.window == 0:
                scale *= options.factor
            continue
        # Overflows since hysteresis was whole again: a growth made it so, or any good step.
        spent, run = 0, 0
        for past in before:
            run = 0 if past else run + 1
            if past:
                spent += 1
            elif options.consecutive_hysteresis or run % options.window == 0:
                spent = 0
        if spent + 1 >= options.hysteresis:
            scale = max(scale / options.factor, options.minimum)
    return scale


@given(scales, histories)
def test_the_scale_is_that_of_its_history(options: LossScale, history: list[bool]) -> None:
    rule = ScaleRule(options)
    for overflowed in history:
        rule.update(overflowed=overflowed)
    assert rule.scale == by_history(options, history)


@given(scales, histories, histories)
def test_a_state_goes_on_as_if_nothing_had_been(options: LossScale, first: list[bool], then: list[bool]) -> None:
    rule, resumed = ScaleRule(options), ScaleRule(options)
    for overflowed in first:
        rule.update(overflowed=overflowed)
    resumed.load_state_dict(rule.state_dict())
    for overflowed in then:
        rule.update(overflowed=overflowed)
        resumed.update(overflowed=overflowed)
    assert rule.state_dict() == resumed.state_dict()


@given(histories)
def test_a_static_scale_stays(history: list[bool]) -> None:
    rule = ScaleRule(LossScale(initial=3.0, dynamic=False))
    for overflowed in history:
        rule.update(overflowed=overflowed)
        assert not rule.is_exhausted
    assert rule.scale == 3.0


def test_deepspeeds_own_example() -> None:
    """Hysteresis 2: the first overflow changes nothing, each further one halves; a whole window without any doubles."""
    rule, seen = ScaleRule(LossScale(initial=256.0, window=2, hysteresis=2, minimum=32.0)), []
    for overflowed in [True, True, True, True, True, False, False, True, True]:
        rule.update(overflowed=overflowed)
        seen.append(rule.scale)
    assert seen == [256, 128, 64, 32, 32, 32, 64, 64, 32]
    assert rule.is_exhausted
