import string

from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.core.machine import Tier
from patrickstar.core.planes import EXP_AVG, GRAD, WEIGHT, PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch, Trace

W0, W2, G0 = PlaneRef(0, WEIGHT), PlaneRef(2, WEIGHT), PlaneRef(0, GRAD)

units = st.builds(PlaneRef, st.integers(0, 30), st.sampled_from([WEIGHT, GRAD, EXP_AVG]))
touches = st.builds(Touch, units, st.booleans(), st.none() | st.just(Tier.HOST))
labels = st.one_of(st.text(string.printable + "é☃\u2028", max_size=12), st.just("-"), st.just("held"))
moments = st.builds(
    Moment,
    phase=st.sampled_from(Phase),
    label=labels,
    touches=st.lists(touches, max_size=5, unique_by=lambda touch: touch.ref).map(tuple),
    held=st.lists(units, max_size=3).map(tuple),
    nonmodel_bytes=st.integers(0, 2**48),
    live_bytes=st.integers(0, 2**48),
)
traces = st.builds(Trace, st.lists(moments, max_size=8).map(tuple))


def example():
    return Trace(
        (
            Moment(Phase.FORWARD, "wte.weight", (Touch(W0),), nonmodel_bytes=4096),
            Moment(Phase.BACKWARD, "wte.weight", (Touch(W0), Touch(G0, writes=True)), (W2,), 81920, 4096),
        )
    )


def test_a_trace_prints_one_compact_line_a_moment():
    assert str(example()).splitlines() == [
        "trace of 2 moments",
        "forward wte.weight 4096 c0.weight",
        "backward wte.weight 4096..81920 c0.grad* c0.weight held c2.weight",
    ]


def test_a_trace_tells_what_it_touches_of_a_plane_each_unit_once():
    assert example().touched(WEIGHT) == [W0]  # what is only held is not touched
    assert example().touched(GRAD) == [G0]
    assert example().touched(EXP_AVG) == []


@settings(deadline=None)
@given(traces, traces)
def test_digests_agree_with_equality(one, other):
    assert (one.digest() == other.digest()) == (one == other)


def test_a_moment_keeps_its_units_sorted_each_once_and_a_write_over_a_read():
    moment = Moment(
        Phase.STEP, "", (Touch(W2), Touch(W0, writes=True), Touch(W2, writes=True), Touch(W0)), (W2, W0, W2)
    )
    assert moment.touches == (Touch(W0, writes=True), Touch(W2, writes=True))
    assert moment.held == (W0, W2)


def test_the_peak_is_the_largest_non_model_bytes():
    assert example().peak == 81920
    assert Trace(()).peak == 0


def test_messages_name_a_moment_by_number_phase_and_label():
    assert example().name(1) == "1 backward wte.weight"
    assert Trace((Moment(Phase.STEP, "", ()),)).name(0) == "0 step"
