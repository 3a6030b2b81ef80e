"""Which planes chunks have, of which types, and where tensors lie that stay fp32 whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.chunk_size import search_chunk_numel
from patrickstar.core.formats import FP32, formats_of_16_bits
from patrickstar.core.layout import Group, TensorSpec, build_layout
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, REST, WEIGHT, PlaneRef
from patrickstar.plan.residency import bytes_of_slot, slots_of

PLANES = (WEIGHT, REST, GRAD, EXP_AVG, EXP_AVG_SQ)


def test_fp32_has_four_planes_of_four_bytes_and_cannot_be_changed() -> None:
    assert {plane: form.itemsize for plane, form in FP32.planes.items()} == dict.fromkeys(
        (WEIGHT, GRAD, EXP_AVG, EXP_AVG_SQ), 4
    )
    with pytest.raises(TypeError):
        FP32.planes[REST] = FP32.planes[GRAD]  # type: ignore[index]


def test_formats_are_values_of_which_others_are_made() -> None:
    specs = [TensorSpec("a", (2048,)), TensorSpec("frozen", (2048,), trainable=False)]
    layout, formats = build_layout(specs, chunk_numel=2048), formats_of_16_bits("bf16")
    assert [formats.is_trained(chunk, layout) for chunk in (0, 1)] == [True, False]
    grown = formats.thaw([1]).widen(0)
    assert [grown.is_trained(chunk, layout) for chunk in (0, 1)] == [True, True]
    assert [grown.of(PlaneRef(chunk, GRAD), layout).dtype for chunk in (0, 1)] == ["float32", "bfloat16"]
    assert (grown.planes, grown.narrowest) == (formats.planes, formats.narrowest)
    assert formats == formats_of_16_bits("bf16") != grown


@pytest.mark.parametrize(("adds_up", "nbytes"), [(False, 14), (True, 16)])
def test_a_parameter_of_the_split_master_takes_as_many_bytes_as_planned(adds_up: bool, nbytes: int) -> None:
    formats = formats_of_16_bits("bf16", adds_up=adds_up)
    assert sum(form.itemsize for form in formats.planes.values()) == nbytes
    layout = build_layout([TensorSpec("a", (2048,))], chunk_numel=2048)
    units = list(formats.units(layout, PLANES))
    assert sum(slots_of(ref, layout, formats) for ref in units) * bytes_of_slot(layout, formats) == nbytes * 2048


def test_what_stays_whole_has_chunks_of_its_own_and_no_rest() -> None:
    specs = [
        TensorSpec("a", (1024,)),
        TensorSpec("norm", (16,), whole=True),
        TensorSpec("b", (1024,)),
        TensorSpec("scale", (5000,), whole=True),
    ]
    layout, formats = build_layout(specs, chunk_numel=2048), formats_of_16_bits("bf16")
    assert [run.tensors for run in layout.runs] == [("a", "b"), ("norm",), ("scale",)]
    assert layout.groups == (Group(0), Group(1, whole=True))
    assert [ref for ref in formats.units(layout, PLANES) if ref.plane == REST] == [PlaneRef(0, REST)]
    assert formats.of(PlaneRef(0, WEIGHT), layout).dtype == "bfloat16"
    assert formats.of(PlaneRef(1, WEIGHT), layout).dtype == "float32"
    assert slots_of(PlaneRef(2, WEIGHT), layout, formats) == 6  # three chunks of fp32 in slots for 16 bits
    assert "fp32 whole from c1 on" in str(layout)


sizes = st.lists(st.tuples(st.integers(0, 5000), st.booleans()), min_size=1, max_size=12)


@given(sizes=sizes)
def test_tensors_keep_their_order_and_never_share_a_chunk_with_the_other_kind(sizes: list[tuple[int, bool]]) -> None:
    specs = [TensorSpec(f"t{number}", (numel,), whole=whole) for number, (numel, whole) in enumerate(sizes)]
    layout = build_layout(specs, chunk_numel=search_chunk_numel(specs))
    for kind in (False, True):
        placed = [name for run in layout.runs for name in run.tensors if specs[int(name[1:])].whole is kind]
        assert placed == [spec.name for spec in specs if spec.whole is kind]
    for spec in specs:
        chunks = {part.chunk for part in layout.parts(spec.name)}
        assert all(layout.is_whole(chunk) is spec.whole for chunk in chunks)
    assert sum(part.stop - part.start for spec in specs for part in layout.parts(spec.name)) == layout.model_numel
