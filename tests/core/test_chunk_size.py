import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from patrickstar.core.chunk_size import GRAIN, PADDING_LIMIT, count_chunks, search_chunk_numel, target_numel
from patrickstar.core.layout import TensorSpec, aligned, build_layout
from patrickstar.errors import LayoutError
from tests.core.shapes import MODELS
from tests.sampling import only

MI = 1 << 20


@pytest.mark.parametrize("model", MODELS)
def test_known_models_waste_less_than_two_percent(model):
    chunk_numel = search_chunk_numel(MODELS[model])
    made = build_layout(MODELS[model], chunk_numel=chunk_numel)
    assert made.padding < PADDING_LIMIT
    assert chunk_numel % GRAIN == 0
    if made.model_numel > 100e6:
        assert MI <= chunk_numel <= 4 * MI


@pytest.mark.parametrize("model", ["gpt2-class of 4M", "gpt2"])
def test_models_of_a_few_million_elements_have_dozens_of_chunks(model):
    made = build_layout(MODELS[model], chunk_numel=search_chunk_numel(MODELS[model]))
    assert 24 <= made.n_chunks <= 200


def models(min_numel):
    """Up to 60 tensors of sizes within any few orders of magnitude: small ones of some hundreds of elements or more."""
    sizes = st.lists(
        st.integers(8, 22).flatmap(lambda bits: st.integers(2**bits, 2 ** (bits + 1))), min_size=1, max_size=60
    )
    made = sizes.map(lambda numels: [TensorSpec(f"p{i}", (numel,)) for i, numel in enumerate(numels)])
    return made.filter(lambda specs: sum(spec.numel for spec in specs) >= min_numel)


@settings(deadline=None)
@given(models(1_000_000))
def test_models_of_a_million_elements_waste_less_than_two_percent(specs):
    chunk_numel = search_chunk_numel(specs)
    assert chunk_numel % GRAIN == 0
    assert build_layout(specs, chunk_numel=chunk_numel).padding < PADDING_LIMIT


@settings(deadline=None)
@given(st.integers(1, 12), st.sampled_from([192, 256, 320, 768, 1000, 1111]), st.sampled_from([512, 5000, 50257]))
def test_transformers_of_any_width_waste_less_than_two_percent(layers, width, vocabulary):
    shapes = [(vocabulary, width), *[(width,), (3 * width, width), (width, width), (4 * width, width)] * layers]
    specs = [TensorSpec(f"p{i}", shape) for i, shape in enumerate(shapes)]
    assume(sum(spec.numel for spec in specs) >= 1_000_000)
    assert build_layout(specs, chunk_numel=search_chunk_numel(specs)).padding < PADDING_LIMIT


@settings(deadline=None)
@given(models(1))
def test_the_search_counts_the_chunks_that_the_layout_makes(specs):
    specs = [TensorSpec("empty", (0,)), *specs, TensorSpec("scalar", ())]
    for chunk_numel in (GRAIN, 10 * GRAIN, 500 * GRAIN):
        n_chunks = count_chunks([aligned(spec.numel) for spec in specs], chunk_numel=chunk_numel)
        assert n_chunks == build_layout(specs, chunk_numel=chunk_numel).n_chunks


def test_a_model_of_a_few_elements_gets_the_smallest_chunks():
    assert search_chunk_numel([TensorSpec("a", (3, 4)), TensorSpec("b", ()), TensorSpec("c", (0,))]) == GRAIN
    assert search_chunk_numel([TensorSpec("a", (0,))]) == GRAIN


def test_the_size_aimed_at_grows_with_the_model_and_is_bounded():
    sizes = [target_numel(numel) for numel in (0, 10_000, 10**6, 10**7, 10**8, 10**9, 7 * 10**9, 10**11)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (GRAIN, 4 * MI)
    assert target_numel(124_000_000) == target_numel(124_000_000, in_granules=True) == MI
    assert target_numel(10**11, in_granules=True) == 32 * MI


def test_a_model_without_parameters_is_refused():
    with pytest.raises(LayoutError, match="no parameters"):
        search_chunk_numel([])


@pytest.mark.sampled
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("model", only([name for name in MODELS if not name.endswith(("70b", "175b"))], MODELS))
def test_chunks_of_a_device_are_whole_granules(model, itemsize):
    granule = (2 << 20) // itemsize
    specs = MODELS[model]
    chunk_numel = search_chunk_numel(specs, granule_numel=granule)
    made = build_layout(specs, chunk_numel=chunk_numel)
    assert chunk_numel % granule == 0
    if target_numel(made.model_numel) < granule:
        assert chunk_numel == granule
    else:
        assert granule <= chunk_numel <= 48 * MI
        assert made.n_chunks >= 8
        # Others near it waste no less, but for what a few octaves are worth.
        others = [build_layout(specs, chunk_numel=times * granule).padding for times in (1, 2, 4)]
        assert made.padding <= min(others) + 3 * PADDING_LIMIT
        assert made.padding < (3 * PADDING_LIMIT if made.model_numel > 10**9 else 0.14)
