"""The chunk size of a model: a function of its tensors only, so that no budget changes a layout (or a bit).

Small chunks move little more than what is used; large ones take fewer actions, and are better blocks for a disk. Around the size aimed at, the
search takes the one that wastes least, and goes further away only where none nearby keeps padding below 2 %. A GPU's memory comes in granules of
2 MiB: sizes are whole ones there, so that what a plan counts is what the driver maps; and a large model has larger chunks there, as its kernels wait
for what each takes of the host.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Final

from patrickstar.core.layout import TensorSpec, aligned, in_groups
from patrickstar.errors import LayoutError

GRAIN: Final = 2048  # elements: a slot is whole pages of 4096 bytes in 16 bit too
PADDING_LIMIT: Final = 0.02

_MI: Final = 1 << 20
_CHUNKS_OF_A_SMALL_MODEL: Final = 64
_CHUNKS_OF_A_LARGE_MODEL: Final = 2048
_LARGE_CHUNKS: Final = (_MI, 4 * _MI)
# Of a GPU's each takes the host some milliseconds a step, whatever its size: decision 0068.
_CHUNKS_OF_A_GPU: Final = 128
_LARGEST_OF_A_GPU: Final = 32 * _MI
_LIMITED_FROM: Final = 1_000_000  # elements: below, grains are coarse, and room to move matters more than padding
# What being one octave away from the size aimed at costs, as if it were padding.
_PRICE_OF_AN_OCTAVE: Final = PADDING_LIMIT / 4
_HIGHER_PRICE: Final = PADDING_LIMIT  # on a GPU, and over ranks
_CHUNKS_OF_A_BLOCK: Final = 4
# In granules, and of a model: how large chunks of granules may be.
_GRANULES: Final = 16
_CHUNKS_AT_LEAST: Final = 16
# Sizes times tensors looked at in one ring: some 20 ms.
_EFFORT: Final = 1 << 19


def search_chunk_numel(specs: Sequence[TensorSpec], *, granule_numel: int = 0, ranks: int = 1) -> int:
    """Elements of a chunk for tensors of these specs: a multiple of 2048, and of a granule where there are granules.

    Padding is below 2 % for a model of a million elements or more, wherever some size gives that: tensors of a few
    elements each waste more on alignment alone, and so do those of a few granules.

    Args:
        granule_numel: elements of the narrowest plane in a granule of the tier that computes; 0: there it comes in pages.
        ranks: over which each chunk is cut evenly, into parts that are whole grains, or granules.
    Raises:
        LayoutError: there are no tensors.
    """
    if not specs:
        raise LayoutError("the model has no parameters: there is nothing to manage")
    # Tensors of one kind have chunks of their own.
    groups = [
        [aligned(numel) for spec in group for numel in spec.tiles()]
        for _, group in groupby(in_groups(specs), TensorSpec.kind)
    ]
    spaces = [space for group in groups for space in group]
    numel = sum(spec.numel for spec in specs)
    grain = ranks * max(GRAIN, granule_numel)
    target = target_numel(numel, in_granules=granule_numel > 0)
    if target < granule_numel:
        return grain
    if ranks > 1:  # each chunk is exchanged by itself, which takes as long as some hundred thousand elements of it
        blocks = Counter[str]()
        for spec in specs:
            blocks[spec.block] += aligned(spec.numel)
        largest = max((size for block, size in blocks.items() if block), default=numel)
        target = min(max(ranks * target, largest // _CHUNKS_OF_A_BLOCK), largest)
    aim = whole_grains(target, grain=grain)
    limit = PADDING_LIMIT if numel >= _LIMITED_FROM and not granule_numel and ranks == 1 else 1.0

    @cache
    def padding(chunk_numel: int) -> float:
        chunks = sum(count_chunks(group, chunk_numel=chunk_numel) for group in groups if group)
        return 1 - numel / (chunk_numel * chunks)

    price = _HIGHER_PRICE if granule_numel or ranks > 1 else _PRICE_OF_AN_OCTAVE

    def cost(chunk_numel: int) -> float:
        return padding(chunk_numel) + price * abs(math.log2(chunk_numel / aim))

    sparest = aim
    for low, high in _rings(aim, whole=whole_grains(sum(spaces), grain=grain), grain=grain):
        sizes = _sizes(low, high, grain=grain, at_most=_EFFORT // len(spaces))
        nearby = min(sizes, key=cost)
        if padding(nearby) < limit:
            return nearby
        sparest = min([sparest, *sizes], key=padding)
        if padding(sparest) < limit:
            return sparest
    return sparest


def target_numel(numel: int, *, in_granules: bool = False) -> int:
    """The size aimed at for a model of so many elements, before padding is looked at. `in_granules`: whether a GPU computes."""
    small, large = _LARGE_CHUNKS
    chunks, largest = (_CHUNKS_OF_A_GPU, _LARGEST_OF_A_GPU) if in_granules else (_CHUNKS_OF_A_LARGE_MODEL, large)
    wanted = max(min(numel // _CHUNKS_OF_A_SMALL_MODEL, small), min(numel // chunks, largest))
    return max(wanted - wanted % GRAIN, GRAIN)


def whole_grains(numel: int, *, grain: int) -> int:
    """The smallest number of elements that is whole grains, one or more, and holds so many."""
    return max(-(-numel // grain), 1) * grain


def count_chunks(spaces: Sequence[int], *, chunk_numel: int) -> int:
    """Number of chunks that `build_layout` makes of tensors that take these spaces, without making a layout."""
    n_chunks = room = 0  # so far, and in the last run
    for space in spaces:
        if space > room:
            length = -(-space // chunk_numel)
            n_chunks, room = n_chunks + length, length * chunk_numel
        room -= space
    return max(n_chunks, 1)


def _rings(aim: int, *, whole: int, grain: int) -> Iterator[tuple[int, int]]:
    """Ranges of sizes to try: around the aim, then smaller by octaves, then larger up to the whole model."""
    low, high = _LARGE_CHUNKS if aim >= _LARGE_CHUNKS[0] else (aim // 2, 2 * aim)
    # Granules, and shares of ranks, are coarse: among more of them are some that fit the model's widths.
    if grain > GRAIN:
        low, high = grain, max(high, 2 * aim, min(_GRANULES * grain, whole // _CHUNKS_AT_LEAST))
    yield low, high
    while low > grain:
        low, smaller = low // 2, low
        yield low, smaller
    while high < whole:
        high, larger = 2 * high, high
        yield larger, min(high, whole)


def _sizes(low: int, high: int, *, grain: int, at_most: int) -> list[int]:
    """Evenly spaced multiples of the grain from `low` to `high`: each of them, or every second, fourth, eighth."""
    low, high = whole_grains(low, grain=grain), whole_grains(high, grain=grain)
    step = grain
    while (high - low) // step > max(at_most, 16):
        step *= 2
    return [*range(low + -low % step, high, step), high]
