import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.core.chunk_size import count_chunks
from patrickstar.core.layout import ALIGNMENT, Run, Slice, TensorSpec, build_layout
from patrickstar.core.planes import GRAD, WEIGHT, PlaneRef
from patrickstar.errors import LayoutError


def specs(*shapes):
    return [TensorSpec(f"p{i}", shape) for i, shape in enumerate(shapes)]


def layout(*shapes, chunk_numel=128):
    return build_layout(specs(*shapes), chunk_numel=chunk_numel)


shapes = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 3)),
        st.tuples(st.integers(0, 700)),
        st.tuples(st.integers(1, 30), st.integers(0, 30)),
    ),
    min_size=1,
    max_size=25,
)
chunk_sizes = st.sampled_from([16, 48, 128, 1024])


def test_tensors_follow_each_other_at_multiples_of_sixteen():
    assert layout((20,), (16,), (3, 5)).slices == {
        "p0": Slice("p0", 0, 0, 20),
        "p1": Slice("p1", 0, 32, 16),
        "p2": Slice("p2", 0, 48, 15),
    }


def test_a_tensor_that_does_not_fit_begins_the_next_chunk():
    made = layout((100,), (30,), (90,))
    assert [(place.chunk, place.offset) for place in made.slices.values()] == [(0, 0), (1, 0), (1, 32)]
    assert made.runs == (Run(0, 1, ("p0",)), Run(1, 1, ("p1", "p2")))


def test_a_tensor_larger_than_a_chunk_takes_a_run_and_small_ones_continue_in_its_tail():
    made = layout((10,), (300,), (40,), (48,), chunk_numel=128)
    assert made.runs == (Run(0, 1, ("p0",)), Run(1, 3, ("p1", "p2")), Run(4, 1, ("p3",)))
    assert made.slices["p2"] == Slice("p2", 1, 304, 40)
    assert made.weight_units("p2") == (PlaneRef(1, WEIGHT),)
    assert made.parts("p1") == ((1, 0, 128, 0), (2, 0, 128, 128), (3, 0, 44, 256))
    assert made.tensors_in(3) == (("p1", 0, 44, 256), ("p2", 48, 88, 0))


def test_a_weight_takes_its_whole_run_and_other_planes_one_slot_a_chunk():
    made = layout((10,), (300,), chunk_numel=128)
    assert made.slots(PlaneRef(1, WEIGHT)) == 3
    assert made.slots(PlaneRef(1, GRAD)) == made.slots(PlaneRef(0, WEIGHT)) == 1
    assert [str(ref) for ref in made.units([GRAD, WEIGHT])] == [
        *("c0.grad", "c0.weight", "c1.grad", "c1.weight", "c2.grad", "c3.grad")
    ]


def test_a_tensor_without_elements_has_a_slice_and_no_space():
    made = layout((0, 7), (128,), (0,), (5,))
    assert made.n_chunks == 2
    assert made.slices["p2"] == Slice("p2", 0, 0, 0)
    assert made.parts("p2") == ()
    assert made.weight_units("p0") == (PlaneRef(0, WEIGHT),)
    assert [piece.name for piece in made.tensors_in(0)] == ["p1"]


def test_a_tensor_without_elements_before_a_large_one_does_not_cost_a_chunk():
    assert layout((0,), (300,)).runs == (Run(0, 3, ("p0", "p1")),)


def test_a_model_of_nothing_but_empty_tensors_still_has_a_chunk():
    made = layout((0,), (0, 3))
    assert (made.n_chunks, made.model_numel, made.padding) == (1, 0, 1.0)


@pytest.mark.parametrize(
    ("bad", "chunk_numel", "why"),
    [
        ([], 128, "no parameters"),
        ([TensorSpec("a", (2,)), TensorSpec("a", (3,))], 128, "two parameters are called 'a'"),
        ([TensorSpec("a", (2, -1))], 128, "a has shape .* negative"),
        (specs((2,)), 0, "chunk of 0 elements"),
        (specs((2,)), 100, "multiple of 16"),
        (specs((2,)), -16, "chunk of -16"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(bad, chunk_numel, why):
    with pytest.raises(LayoutError, match=why):
        build_layout(bad, chunk_numel=chunk_numel)


@settings(deadline=None)
@given(shapes, chunk_sizes, st.none() | st.integers(1, 200))
def test_every_element_of_every_tensor_and_tile_has_one_place_of_its_own(shapes, chunk_numel, tile_numel):
    given = [TensorSpec(f"p{i}", shape, tile_numel=tile_numel) for i, shape in enumerate(shapes)]
    made = build_layout(given, chunk_numel=chunk_numel)
    owner = {}
    for spec in given:
        parts, covered = made.parts(spec.name), 0
        for part in parts:
            assert 0 <= part.start < part.stop <= chunk_numel
            assert part.tensor_start == covered
            for at in range(part.start, part.stop):
                element = (spec.name, covered + at - part.start)
                assert owner.setdefault((part.chunk, at), element) == element
            covered += part.stop - part.start
            head, start = made.weight_place(part)
            run = made.run_of(part.chunk)
            assert head.chunk == run.head
            assert spec.name in run.tensors
            assert head.chunk * chunk_numel + start == part.chunk * chunk_numel + part.start
        assert covered == spec.numel
        labels = made.leaves(spec.name)
        assert sum(len(made.parts(label)) for label in labels) == len(parts)
        assert all(part.tensor_start == 0 for label in labels for part in made.parts(label)[:1])
        assert all(made.tiles(label)[0].offset % ALIGNMENT == 0 for label in labels)
    seen_from_chunks = {
        (chunk, at): (name, tensor_start + at - start)
        for chunk in range(made.n_chunks)
        for name, start, stop, tensor_start in made.tensors_in(chunk)
        for at in range(start, stop)
    }
    assert seen_from_chunks == owner
    assert made.padding == pytest.approx(1 - len(owner) / (made.n_chunks * chunk_numel))
    spaces = [-(-numel // ALIGNMENT) * ALIGNMENT for spec in given for numel in spec.tiles()]
    assert made.n_chunks == count_chunks(spaces, chunk_numel=chunk_numel)


@settings(deadline=None)
@given(shapes, chunk_sizes)
def test_runs_partition_the_chunks_and_hold_their_tensors(shapes, chunk_numel):
    made = layout(*shapes, chunk_numel=chunk_numel)
    chunks = [chunk for run in made.runs for chunk in range(run.head, run.head + run.length)]
    assert chunks == list(range(made.n_chunks))
    assert [name for run in made.runs for name in run.tensors] == list(made.slices)
    for run in made.runs:
        assert all(made.run_of(chunk) == run for chunk in range(run.head, run.head + run.length))
        for name in run.tensors:
            place = made.slices[name]
            assert place.chunk == run.head
            assert place.offset % ALIGNMENT == 0
            assert place.offset + place.numel <= run.length * chunk_numel
        # Only a tensor that no chunk can hold makes a run, and no longer one than it needs.
        longest = max(made.slices[name].numel for name in run.tensors)
        assert run.length == max(1, -(-longest // chunk_numel))


@settings(deadline=None)
@given(shapes, shapes, chunk_sizes)
def test_equal_specs_give_equal_layouts_and_digests(one, other, chunk_numel):
    first, again, second = (layout(*these, chunk_numel=chunk_numel) for these in (one, one, other))
    assert first == again
    assert (first.digest() == second.digest()) == (first == second)


def test_the_digest_knows_the_chunk_size():
    assert layout((5,), chunk_numel=128).digest() != layout((5,), chunk_numel=256).digest()


def test_a_layout_prints_readable_text():
    assert str(layout((10,), (300,), (3,))).splitlines() == [
        "layout of 4 chunks of 128 elements, padding 38.87%",
        "c0",
        "  0+10 p0",
        "c1 x3",
        "  0+300 p1",
        "  304+3 p2",
    ]


def test_a_layout_pickles_copies_and_cannot_be_changed():
    made = layout((10,), (300,))
    assert pickle.loads(pickle.dumps(made)) == made
    assert copy.deepcopy(made) == made
    with pytest.raises(TypeError):
        made.slices["p0"] = made.slices["p1"]


def test_a_parameter_that_is_called_as_a_tile_is_refused():
    with pytest.raises(LayoutError, match=r"a\[1\] is the name of a parameter and of a tile"):
        build_layout([TensorSpec("a", (64,), tile_numel=32), TensorSpec("a[1]", (8,))], chunk_numel=128)
    build_layout([TensorSpec("a", (64,)), TensorSpec("a[1]", (8,))], chunk_numel=128)


def test_tiles_are_laid_out_as_tensors_and_their_parts_are_their_tensors():
    made = build_layout(
        [TensorSpec("a", (20,)), TensorSpec("b", (25, 10), tile_numel=100), TensorSpec("c", (8,))], chunk_numel=128
    )
    assert made.tiles("b") == ((1, 0, 0, 100), (2, 0, 100, 100), (3, 0, 200, 50))
    assert made.runs == (Run(0, 1, ("a",)), Run(1, 1, ("b",)), Run(2, 1, ("b",)), Run(3, 1, ("b", "c")))
    assert made.parts("b") == ((1, 0, 100, 0), (2, 0, 100, 100), (3, 0, 50, 200))
    assert made.leaves("b") == ("b[0]", "b[1]", "b[2]")
    assert made.leaves("a") == ("a",)
    assert [made.parts(label) for label in made.leaves("b")] == [((1, 0, 100, 0),), ((2, 0, 100, 0),), ((3, 0, 50, 0),)]
    assert [made.owner(label) for label in ("a", "b", "b[2]")] == ["a", "b", "b"]
    assert made.weight_units("b") == tuple(PlaneRef(chunk, WEIGHT) for chunk in (1, 2, 3))
    assert made.weight_units("b[1]") == (PlaneRef(2, WEIGHT),)
    assert made.slots(PlaneRef(1, WEIGHT)) == 1
    assert "100 b from 100" in str(made)
