from patrickstar.core.planes import EXP_AVG, GRAD, WEIGHT, PlaneRef


def test_a_unit_prints_as_chunk_and_plane():
    assert str(PlaneRef(12, WEIGHT)) == "c12.weight"


def test_units_sort_by_chunk_then_plane():
    units = [PlaneRef(10, GRAD), PlaneRef(9, WEIGHT), PlaneRef(10, EXP_AVG)]
    assert sorted(units) == [PlaneRef(9, WEIGHT), PlaneRef(10, EXP_AVG), PlaneRef(10, GRAD)]
