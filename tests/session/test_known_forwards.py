"""What is learned from steps of one kind: which trace is expected of the next."""

from __future__ import annotations

from typing import cast

from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.plan.residency import Residency
from patrickstar.plan.stretch import Ask, Draft, Stretch, StretchKind
from patrickstar.step.known_forwards import KnownForward


def trace(*words: str) -> Trace:
    """Of words such as "f3", forward with chunk 3, and "b3"."""
    phases = {"f": Phase.FORWARD, "b": Phase.BACKWARD}
    return Trace(
        tuple(
            Moment(phases[word[0]], word, (Touch(PlaneRef(int(word[1:]), "weight")),), nonmodel_bytes=8)
            for word in words
        )
    )


WHOLE = trace("f0", "f1", "f2", "b2", "b1", "b0")
DROPPED = trace("f0", "f2", "b2", "b0")
OTHER_BACKWARD = trace("f0", "f1", "f2", "b1", "b0")
TWICE = trace("f0", "f1", "f2", "b2", "b1", "b0", "b0", "b1", "b2")


def step(followed: Trace | None, *, reason: str = "", position: int = 0, twice: bool = False) -> Stretch:
    stretch = begun(followed, position=position)
    stretch.gives_gradients()
    if twice:
        stretch.differentiates()
    if reason:
        stretch.depart(reason)
    return stretch


def begun(followed: Trace | None, *, position: int) -> Stretch:
    """Nothing here asks where units are, or looks into the plan."""
    if followed is None:
        return Stretch(StretchKind.TRAINING)
    ask = Ask(kind=StretchKind.TRAINING, trace=followed, start=cast("Residency", None))
    stretch = Stretch(StretchKind.TRAINING, Draft(ask, followed, followed))
    stretch.position = position
    return stretch


def departed(followed: Trace | None, *, position: int = 3, twice: bool = False) -> Stretch:
    return step(followed, reason="it did", position=position, twice=twice)


def test_one_odd_step_is_no_model_for_the_next_and_two_in_a_row_are() -> None:
    known = KnownForward(trace=WHOLE)
    known.learn(departed(WHOLE), DROPPED)
    known.learn(step(WHOLE), WHOLE)
    known.learn(departed(WHOLE), DROPPED)
    assert known.trace is WHOLE
    known.learn(departed(WHOLE), OTHER_BACKWARD)
    assert known.trace is OTHER_BACKWARD


def test_after_two_odd_steps_that_were_not_written_down_the_next_is() -> None:
    known = KnownForward(trace=WHOLE)
    known.learn(departed(WHOLE), None)
    assert not known.measure_next
    known.learn(departed(WHOLE), None)
    assert known.measure_next
    known.learn(departed(WHOLE), OTHER_BACKWARD)
    assert not known.measure_next
    assert known.trace is OTHER_BACKWARD


def test_a_forward_without_a_forecast_is_expected_to_do_what_it_did() -> None:
    known = KnownForward(reason="it cannot be traced")
    known.learn(departed(None), DROPPED)
    assert known.trace is DROPPED


def test_no_more_than_three_measurements_take_the_place_of_another() -> None:
    known = KnownForward(trace=WHOLE)
    found = [trace(f"f{number}", "b0") for number in range(9)]
    for one in found:
        assert known.trace is not None
        known.learn(departed(known.trace), one)
    assert known.measurements == 3
    assert known.trace is found[3]


# forwards that branch by chance


def test_steps_that_took_other_branches_are_no_model_however_many() -> None:
    known = KnownForward(trace=WHOLE, by_chance=True)
    for _ in range(9):
        known.learn(departed(WHOLE, position=1), DROPPED)
        known.learn(departed(WHOLE, position=1), None)
    assert known.trace is WHOLE
    assert not known.measure_next
    assert known.measured is DROPPED


def test_steps_that_departed_in_backward_are() -> None:
    known = KnownForward(trace=WHOLE, by_chance=True)
    known.learn(departed(WHOLE, position=3), OTHER_BACKWARD)
    known.learn(departed(WHOLE, position=1), DROPPED)
    assert known.trace is WHOLE
    known.learn(departed(WHOLE, position=3), OTHER_BACKWARD)
    assert known.trace is OTHER_BACKWARD


def test_so_they_are_where_steps_are_not_written_down() -> None:
    known = KnownForward(trace=WHOLE, by_chance=True)
    known.learn(departed(WHOLE, position=3), None)
    known.learn(departed(WHOLE, position=2), None)
    assert not known.measure_next
    known.learn(departed(WHOLE, position=3), None)
    assert known.measure_next
    known.learn(departed(WHOLE, position=0), DROPPED)
    assert known.trace is WHOLE
    assert not known.measure_next


def test_what_was_measured_with_a_gradient_differentiated_is_kept_only_with_the_branches_that_need_most() -> None:
    known = KnownForward(trace=WHOLE, by_chance=True)
    known.learn(departed(WHOLE, position=1, twice=True), DROPPED)
    assert known.expected.trace is None
    known.learn(departed(None, twice=True), TWICE)
    assert known.expected.trace is TWICE


# steps that differentiate a gradient


def test_a_step_that_differentiates_a_gradient_is_a_model_for_the_next_at_once() -> None:
    known = KnownForward(trace=WHOLE)
    known.learn(departed(WHOLE, twice=True), TWICE)
    assert known.expected.trace is TWICE
    assert known.trace is WHOLE
    assert known.twice is not None
    assert (known.trace, known.twice.trace) == (WHOLE, TWICE)
    known.learn(step(TWICE, twice=True), TWICE)
    assert known.expected.trace is TWICE


def test_one_that_was_not_written_down_is_measured_next() -> None:
    known = KnownForward(trace=WHOLE)
    known.learn(departed(WHOLE, twice=True), None)
    assert known.expected.trace is None
    assert "measured" in known.expected.reason
    known.learn(departed(None, twice=True), TWICE)
    assert known.expected.trace is TWICE
    assert known.trace is WHOLE


def test_a_plain_step_afterwards_goes_by_the_plain_trace_again() -> None:
    known = KnownForward(trace=WHOLE)
    known.learn(departed(WHOLE, twice=True), TWICE)
    known.learn(departed(TWICE), WHOLE)
    assert known.expected is known
    assert known.trace is WHOLE
    for _ in range(3):  # at every other step
        known.learn(departed(WHOLE, twice=True), TWICE)
        assert known.expected is known, "the last time, none followed"
        known.learn(step(WHOLE), WHOLE)
    assert known.departures == 0
    known.learn(departed(WHOLE, twice=True), TWICE)
    known.learn(departed(WHOLE, twice=True), TWICE)
    assert known.expected.trace is TWICE, "this time, one followed"


def test_a_forward_without_a_step_says_nothing_of_what_follows() -> None:
    known = KnownForward(trace=WHOLE)
    known.learn(departed(WHOLE, twice=True), TWICE)
    known.learn(begun(TWICE, position=2), None)
    assert known.expected.trace is TWICE


def test_each_course_has_departures_of_its_own() -> None:
    known = KnownForward(trace=WHOLE)
    known.learn(departed(WHOLE, twice=True), TWICE)
    other = trace("f0", "b0", "b0")
    known.learn(departed(TWICE, twice=True), other)
    assert known.expected.trace is TWICE
    known.learn(departed(TWICE, twice=True), other)
    assert known.expected.trace is other
    assert known.trace is WHOLE


# reasons


def test_a_departure_is_explained() -> None:
    known = KnownForward(trace=WHOLE, by_chance=True)
    assert "draws" in known.explain(departed(WHOLE, position=1))
    assert not known.explain(departed(WHOLE, position=3)), "the forward was as foreseen"
    assert "create_graph=True" in known.explain(departed(WHOLE, twice=True))
    assert not KnownForward(trace=WHOLE).explain(departed(WHOLE, position=1))
    assert not known.explain(departed(None))
