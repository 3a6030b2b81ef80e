"""Shares of ranks in chunks: nothing is lost, nothing is there twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.chunk_size import GRAIN, search_chunk_numel
from patrickstar.core.layout import Group, TensorSpec, build_layout
from patrickstar.core.planes import WEIGHT, PlaneRef
from patrickstar.core.shard_layout import shard_of
from patrickstar.errors import LayoutError

numels = st.lists(st.integers(0, 900), min_size=1, max_size=12)
sizes = st.integers(1, 5)


def specs(given, blocks=("",)):
    return [TensorSpec(f"p{i}", (numel,), block=blocks[i % len(blocks)]) for i, numel in enumerate(given)]


@given(numels, sizes, st.integers(1, 9), st.sampled_from([("",), ("", "a", "b")]))
def test_the_parts_of_all_ranks_are_each_tensor_once(given, size, length, blocks):
    layout = build_layout(specs(given, blocks), chunk_numel=16 * size * length)
    shares = [shard_of(layout, rank, size) for rank in range(size)]
    for name, place in layout.slices.items():
        seen = [0] * place.numel
        for share in shares:
            for part in share.parts(name):
                at = share.rank * share.chunk_numel + part.start
                whole = next(p for p in layout.parts(name) if p.chunk == part.chunk and p.start <= at < p.stop)
                assert part.tensor_start - whole.tensor_start == at - whole.start
                assert 0 <= part.start < part.stop <= share.chunk_numel
                for element in range(part.tensor_start, part.tensor_start + part.stop - part.start):
                    seen[element] += 1
        assert seen == [1] * place.numel


@given(numels, sizes, st.integers(1, 9))
def test_pieces_by_chunk_are_the_parts_by_tensor(given, size, length):
    layout = build_layout(specs(given), chunk_numel=16 * size * length)
    for share in (shard_of(layout, rank, size) for rank in range(size)):
        by_tensor = {(name, *part) for name in layout.slices for part in share.parts(name)}
        pieces = {(name, chunk, *where) for chunk in range(layout.n_chunks) for name, *where in share.tensors_in(chunk)}
        assert pieces == by_tensor


def test_one_rank_has_what_the_layout_has():
    layout = build_layout(specs([100, 300, 7]), chunk_numel=128)
    share = shard_of(layout, 0, 1)
    assert all(share.parts(name) == layout.parts(name) for name in layout.slices)
    assert [share.tensors_in(chunk) for chunk in range(layout.n_chunks)] == [
        *map(layout.tensors_in, range(layout.n_chunks))
    ]


def test_a_chunk_that_cannot_be_cut_evenly_is_refused():
    with pytest.raises(LayoutError, match="64 elements cannot be cut evenly over 3 ranks.*a multiple of 3"):
        shard_of(build_layout(specs([10]), chunk_numel=64), 0, 3)


def test_tensors_of_different_blocks_share_no_chunk_and_come_by_the_first_of_each():
    made = build_layout(specs([20, 20, 20, 20, 20], ("", "b", "a")), chunk_numel=128)
    assert made.groups == (Group(0), Group(1, block="b"), Group(2, block="a"))
    assert [made.slices[f"p{i}"].chunk for i in range(5)] == [0, 1, 2, 0, 1]
    share = shard_of(made, 0, 2)
    assert [share.block_of(chunk) for chunk in range(3)] == ["", "b", "a"]


def test_what_is_gathered_for_a_tensor_are_the_chunks_of_its_block():
    share = shard_of(build_layout(specs([20, 20, 300, 20], ("", "b")), chunk_numel=128), 1, 2)
    assert {name: share.group(name) for name in share.slices} == {"p0": "", "p1": "b", "p2": "", "p3": "b"}
    assert dict(share.chunks_of) == {"": (0, 1, 2, 3), "b": (4,)}
    assert [share.offset(f"p{i}") for i in range(4)] == [0, 0, 128, 32]
    assert share.weight_units("p3") == (PlaneRef(4, WEIGHT),)
    assert (share.chunk_numel, share.group_numel("")) == (64, 512)


def test_what_stays_fp32_whole_is_gathered_apart_from_the_rest_of_its_block():
    given = [TensorSpec("a", (20,), block="b"), TensorSpec("norm", (4,), whole=True, block="b"), TensorSpec("c", (9,))]
    share = shard_of(build_layout(given, chunk_numel=128), 0, 2)
    assert dict(share.chunks_of) == {"b": (0, 2), "": (1,)}
    assert dict(share.chunks_in) == {"b": (0,), "": (1,), "b in fp32": (2,)}
    assert {name: share.group(name) for name in share.slices} == {"a": "b", "norm": "b in fp32", "c": ""}
    assert (share.offset("norm"), share.weight_units("norm")) == (0, (PlaneRef(2, WEIGHT),))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("granule", [0, 1 << 19])
def test_sizes_over_ranks_are_whole_shares_with_little_padding(ranks, granule):
    block = [768 * 768 * 4, 768 * 768 * 4, 768 * 768, 768 * 768 * 3, 768]
    given = [50257 * 768, 1024 * 768] + block * 24
    named = [
        TensorSpec(f"p{i}", (numel,), block="" if i < 2 else f"h.{(i - 2) // len(block)}")
        for i, numel in enumerate(given)
    ]
    chunk_numel = search_chunk_numel(named, granule_numel=granule, ranks=ranks)
    assert chunk_numel % (ranks * max(GRAIN, granule)) == 0
    assert build_layout(named, chunk_numel=chunk_numel).padding < (0.05 if not granule else 0.4)
