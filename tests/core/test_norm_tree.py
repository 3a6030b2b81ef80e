"""Which sums of a norm's tree each rank has: of whole blocks one number, of a cut block the largest subtrees."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.layout import TensorSpec, build_layout
from patrickstar.core.norm_tree import BLOCK_NUMEL, ROW_NUMEL, BlockShare, Subtree, block_shares, shares_by_rank
from patrickstar.core.norm_tree import subtrees as largest_subtrees
from patrickstar.core.shard_layout import shard_of

cuts = st.integers(0, BLOCK_NUMEL) | st.integers(0, 4096).map(lambda row: 16 * row) | st.integers(0, 40)


def tree(rows):
    """The definition: neighbours are added until one row is left."""
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]


def row_sum(row):
    while len(row) > 1:
        row = row[: len(row) // 2] + row[len(row) // 2 :]
    return row[0]


@given(st.sets(cuts, max_size=5), st.integers(0, 2**16))
def test_the_subtrees_of_all_ranks_finish_to_the_bits_of_one(between, seed):
    squares = np.random.default_rng(seed).lognormal(0, 8, BLOCK_NUMEL) ** 2
    put = np.zeros((BLOCK_NUMEL // ROW_NUMEL, ROW_NUMEL))
    edges = sorted({0, BLOCK_NUMEL, *between})
    for start, stop in zip(edges, edges[1:], strict=False):
        mine = np.zeros(BLOCK_NUMEL)
        mine[start:stop] = squares[start:stop]
        for row, level in largest_subtrees(start, stop):
            put[row] += tree(mine.reshape(-1, ROW_NUMEL)[row : row + (1 << level)])
    assert row_sum(tree(put)).tobytes() == row_sum(tree(squares.reshape(-1, ROW_NUMEL))).tobytes()


@given(st.sets(cuts, min_size=2, max_size=2))
def test_subtrees_are_aligned_disjoint_and_as_large_as_they_can_be(edges):
    start, stop = sorted(edges)
    found = largest_subtrees(start, stop)
    rows = [row for row, level in found for row in range(row, row + (1 << level))]
    assert rows == list(range(start // ROW_NUMEL, -(-stop // ROW_NUMEL)))
    held = range(-(-start // ROW_NUMEL), stop // ROW_NUMEL)  # of which no element is another's
    for row, level in found:
        assert row % (1 << level) == 0
        assert row in held or level == 0
        parent = range(row - row % (2 << level), row - row % (2 << level) + (2 << level))
        assert row not in held or not (parent.start in held and parent[-1] in held), (row, level)
    assert len(found) <= 2 * 12 + 2


@pytest.mark.parametrize(
    ("start", "stop", "numel", "blocks"),
    [
        (0, 100, 100, [BlockShare(0, 100)]),
        (0, 96, 100, [BlockShare(0, 96, (Subtree(0, 2), Subtree(4, 1)))]),
        (96, 100, 100, [BlockShare(96, 100, largest_subtrees(96, 128))]),
        (0, 3 * BLOCK_NUMEL, 9 * BLOCK_NUMEL, [BlockShare(0, 3 * BLOCK_NUMEL)]),
        (32_768, 2 * BLOCK_NUMEL + 20, 9 * BLOCK_NUMEL, [
            BlockShare(32_768, BLOCK_NUMEL, (Subtree(2_048, 11),)),
            BlockShare(BLOCK_NUMEL, 2 * BLOCK_NUMEL),
            BlockShare(2 * BLOCK_NUMEL, 2 * BLOCK_NUMEL + 20, (Subtree(0, 0), Subtree(1, 0))),
        ]),
    ],
)  # fmt: skip
def test_whole_blocks_are_one_number_and_zeros_after_the_last_element_are_its_rank_s(start, stop, numel, blocks):
    found = list(block_shares(start, stop, numel=numel))
    assert found == blocks
    assert [share.sums for share in found] == [
        len(share.blocks) if not share.subtrees else 16 * len(share.subtrees) for share in found
    ]


@given(st.lists(st.integers(0, 3 * BLOCK_NUMEL), min_size=1, max_size=4), st.integers(2, 4), st.integers(100, 1 << 13))
def test_shares_of_a_rank_are_its_parts_in_their_order(numels, size, length):
    specs = [TensorSpec(f"p{i}", (numel,)) for i, numel in enumerate(numels)]
    layout = build_layout(specs, chunk_numel=16 * size * length)
    for rank in range(size):
        shard = shard_of(layout, rank, size)
        for name in layout.slices:
            shares = iter(shares_by_rank(shard, name)[rank])
            for part in shard.parts(name):
                at = part.tensor_start
                while at < part.tensor_start + part.stop - part.start:
                    share = next(shares)
                    assert share.start == at
                    at = share.stop
                assert at == part.tensor_start + part.stop - part.start
            assert next(shares, None) is None
