import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, REST, WEIGHT, PlaneRef

PLANES = (WEIGHT, REST, GRAD, EXP_AVG, EXP_AVG_SQ)


def test_a_unit_prints_as_chunk_and_plane():
    assert str(PlaneRef(12, WEIGHT)) == "c12.weight"


@settings(deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(PLANES))
def test_a_unit_parses_back(chunk, plane):
    assert PlaneRef.parse(str(PlaneRef(chunk, plane))) == PlaneRef(chunk, plane)


@pytest.mark.parametrize(
    "text", ["", "c", "c.weight", "12.weight", "c12", "c12.", "c-1.weight", "c12.weight x2", "c².grad"]
)
def test_what_is_no_unit_is_refused_by_its_text(text):
    with pytest.raises(ValueError, match="is not a plane of a chunk") as refusal:
        PlaneRef.parse(text)
    assert repr(text) in str(refusal.value)


def test_units_sort_by_chunk_then_plane():
    units = [PlaneRef(10, GRAD), PlaneRef(9, WEIGHT), PlaneRef(10, EXP_AVG)]
    assert sorted(units) == [PlaneRef(9, WEIGHT), PlaneRef(10, EXP_AVG), PlaneRef(10, GRAD)]
