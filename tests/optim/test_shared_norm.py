"""The norm of gradients of which each rank has some elements has the bits of one rank that has all; little travels for it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.core.layout import TensorSpec, build_layout
from patrickstar.core.norm_tree import BLOCK_NUMEL, shares_by_rank
from patrickstar.core.shard_layout import shard_of
from patrickstar.optim.norm import GlobalNorm, SharedNorm
from tests.optim.test_norm import added, gradients


class Sent(Exception):
    pass


def numbers_over_ranks(tensors, size, chunk_numel, factors=()):
    """The sums of all blocks as each rank has them in the end, and how many numbers a rank has sent."""
    specs = [TensorSpec(f"p{i}", tuple(tensor.shape)) for i, tensor in enumerate(tensors)]
    layouts = [shard_of(build_layout(specs, chunk_numel=chunk_numel), rank, size) for rank in range(size)]
    given = dict(zip(layouts[0].slices, tensors, strict=True))
    shares = [shares_by_rank(layouts[0], name) for name in given]
    sent = []

    def send(mine):
        sent.append(mine)
        raise Sent

    norms = []
    for layout in layouts:
        norm = SharedNorm(layout.rank, shares, send)
        for name, tensor in given.items():
            for part in layout.parts(name):
                stop = part.tensor_start + part.stop - part.start
                norm.add(tensor[part.tensor_start : stop], factors)
            norm.end_tensor()
        with pytest.raises(Sent):
            norm.numbers()
        norms.append(norm)
    of_all = torch.stack(sent)
    for norm in norms:
        norm._gather = lambda _: of_all
    return [norm.numbers() for norm in norms], of_all.shape[1]


@settings(max_examples=25, deadline=None)
@given(
    numels=st.lists(st.sampled_from([0, 1, 17, 5_000, 70_000, 2 * BLOCK_NUMEL, 300_001]), min_size=1, max_size=3),
    size=st.integers(2, 4),
    length=st.integers(20, 5_000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    factors=st.sampled_from([(), (0.3, 0.7)]),
)
def test_every_rank_has_the_sums_of_one(numels, size, length, dtype, factors):
    tensors = [tensor.to(dtype) for tensor in gradients(*[(numel,) for numel in numels])]
    scales = [torch.tensor(factor) for factor in factors]
    want = added(GlobalNorm(), tensors, scales).numbers().numpy().tobytes()
    found, _ = numbers_over_ranks(tensors, size, 16 * size * length, scales)
    assert [numbers.numpy().tobytes() for numbers in found] == [want] * size


@pytest.mark.parametrize(("size", "chunk_numel"), [(2, 16), (4, 16), (2, 48), (3, 96)])
def test_cuts_may_go_through_a_row(size, chunk_numel):
    tensors = gradients((100,), (1_000,), (7,), (0,))
    found, _ = numbers_over_ranks(tensors, size, chunk_numel)
    want = added(GlobalNorm(), tensors).numbers()
    assert all(torch.equal(numbers, want) for numbers in found)


def test_an_overflow_is_one_on_all_ranks():
    (tensor,) = gradients((100_000,))
    tensor[70_000] = torch.inf
    found, _ = numbers_over_ranks([tensor], 2, 1 << 16)
    assert all(torch.equal(numbers, added(GlobalNorm(), [tensor]).numbers()) for numbers in found)


def test_a_handful_of_numbers_travels():
    numel = 40 * BLOCK_NUMEL
    _, sent = numbers_over_ranks([torch.ones(numel)], 2, 8 * BLOCK_NUMEL - 1_600)
    parts, most = 6, 16 * 2 * 12  # of a cut block: on both sides of it, a subtree of each level
    assert 8 * sent < 8 * (20 + parts * 2 * most) < 4 * numel // 2 / 100
