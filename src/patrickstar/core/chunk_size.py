"""The chunk size of a model: a function of its tensors only, so that no budget changes a layout (or a bit).

Small chunks move little more than what is used; large ones take fewer actions, and are better blocks for a disk. The
size aimed at gives small models some 64 chunks, large ones chunks of 1 to 4 Mi elements. Around it, the search takes
the size that wastes least, and goes further away only where no size nearby keeps padding below 2 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

from patrickstar.core.layout import TensorSpec, aligned
from patrickstar.errors import LayoutError

GRAIN: Final = 2048  # elements: a slot is whole pages of 4096 bytes in 16 bit too
PADDING_LIMIT: Final = 0.02

_MI: Final = 1 << 20
_CHUNKS_OF_A_SMALL_MODEL: Final = 64
_CHUNKS_OF_A_LARGE_MODEL: Final = 2048
_LARGE_CHUNKS: Final = (_MI, 4 * _MI)
_LIMITED_FROM: Final = 1_000_000  # elements: below, grains are coarse, and room to move matters more than padding
# What being one octave away from the size aimed at costs, as if it were padding.
_PRICE_OF_AN_OCTAVE: Final = PADDING_LIMIT / 4
# Sizes times tensors looked at in one ring: some 20 ms.
_EFFORT: Final = 1 << 19


def search_chunk_numel(specs: Sequence[TensorSpec]) -> int:
    """Elements of a chunk for tensors of these specs: a multiple of 2048.

    Padding is below 2 % for a model of a million elements or more, wherever some size gives that: tensors of a few
    elements each waste more on alignment alone.

    Raises:
        LayoutError: there are no tensors.
    """
    if not specs:
        raise LayoutError("the model has no parameters: there is nothing to manage")
    # Tensors of one kind have chunks of their own.
    kinds = sorted({spec.kind() for spec in specs})
    groups = [[aligned(numel) for spec in specs if spec.kind() == kind for numel in spec.tiles()] for kind in kinds]
    spaces = [space for group in groups for space in group]
    numel = sum(spec.numel for spec in specs)
    aim = target_numel(numel)
    limit = PADDING_LIMIT if numel >= _LIMITED_FROM else 1.0

    @cache
    def padding(chunk_numel: int) -> float:
        chunks = sum(count_chunks(group, chunk_numel=chunk_numel) for group in groups if group)
        return 1 - numel / (chunk_numel * chunks)

    def cost(chunk_numel: int) -> float:
        return padding(chunk_numel) + _PRICE_OF_AN_OCTAVE * abs(math.log2(chunk_numel / aim))

    sparest = aim
    for low, high in _rings(aim, whole=_whole_grains(sum(spaces))):
        sizes = _sizes(low, high, at_most=_EFFORT // len(spaces))
        nearby = min(sizes, key=cost)
        if padding(nearby) < limit:
            return nearby
        sparest = min([sparest, *sizes], key=padding)
        if padding(sparest) < limit:
            return sparest
    return sparest


def target_numel(numel: int) -> int:
    """The size aimed at for a model of so many elements, before padding is looked at."""
    small, large = _LARGE_CHUNKS
    wanted = max(min(numel // _CHUNKS_OF_A_SMALL_MODEL, small), min(numel // _CHUNKS_OF_A_LARGE_MODEL, large))
    return max(wanted - wanted % GRAIN, GRAIN)


def count_chunks(spaces: Sequence[int], *, chunk_numel: int) -> int:
    """Number of chunks that `build_layout` makes of tensors that take these spaces, without making a layout."""
    n_chunks, room = 1, chunk_numel
    fresh = True  # the chunk at hand is still empty: a tensor that it cannot hold makes a run of it
    for space in spaces:
        if space <= room:
            room -= space
            fresh = fresh and not space
        else:
            length = -(-space // chunk_numel)
            n_chunks += length - fresh
            room = length * chunk_numel - space
            fresh = False
    return n_chunks


def _rings(aim: int, *, whole: int) -> Iterator[tuple[int, int]]:
    """Ranges of sizes to try: around the aim, then smaller by octaves, then larger up to the whole model."""
    low, high = _LARGE_CHUNKS if aim >= _LARGE_CHUNKS[0] else (aim // 2, 2 * aim)
    yield low, high
    while low > GRAIN:
        low, smaller = low // 2, low
        yield low, smaller
    while high < whole:
        high, larger = 2 * high, high
        yield larger, min(high, whole)


def _sizes(low: int, high: int, *, at_most: int) -> list[int]:
    """Evenly spaced multiples of the grain from `low` to `high`: each of them, or every second, fourth, eighth."""
    low, high = _whole_grains(low), _whole_grains(high)
    step = GRAIN
    while (high - low) // step > max(at_most, 16):
        step *= 2
    return [*range(low + -low % step, high, step), high]


def _whole_grains(numel: int) -> int:
    return max(-(-numel // GRAIN), 1) * GRAIN
