"""The block of a tensor on a device, against the rules of torch's allocator played through."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.cuda_blocks import block_bytes, cuda_block_bytes

GRAIN, MIB = 512, 1 << 20


class Segments:
    """torch's allocator of one stream: `malloc`, `get_free_block`, `should_split` and `try_merge_blocks` of c10/cuda/CUDACachingAllocator.cpp."""

    def __init__(self) -> None:
        # By pool, small and large: segments as lists of blocks, [bytes, whether it is given out].
        self.pools: tuple[list[list[list[int]]], list[list[list[int]]]] = ([], [])

    def allocate(self, nbytes: int) -> tuple[list[list[int]], list[int]]:
        size = max(GRAIN, -(-nbytes // GRAIN) * GRAIN)
        is_small = size <= MIB
        pool = self.pools[0 if is_small else 1]
        free = [
            (block[0], segment, block) for segment in pool for block in segment if not block[1] and block[0] >= size
        ]
        if free:
            _, segment, block = min(free, key=lambda found: found[0])
        else:
            whole = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            segment = [[whole, 0]]
            block = segment[0]
            pool.append(segment)
        rest = block[0] - size
        if rest >= GRAIN if is_small else rest > MIB:
            segment.insert(segment.index(block) + 1, [rest, 0])
            block[0] = size
        block[1] = 1
        return segment, block

    @staticmethod
    def free(segment: list[list[int]], block: list[int]) -> None:
        block[1] = 0
        at = next(index for index, other in enumerate(segment) if other is block)
        for first in (at, at - 1):
            if 0 <= first < len(segment) - 1 and not segment[first][1] and not segment[first + 1][1]:
                segment[first][0] += segment.pop(first + 1)[0]


SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 40 * MIB), st.integers(MIB - 1, MIB + 1))


@given(st.lists(st.tuples(SIZES, st.none() | st.integers(0, 9)), max_size=40))
def test_no_block_is_larger_than_was_counted(steps: list[tuple[int, int | None]]) -> None:
    """`steps`: the bytes of a tensor, and which of those alive is freed before it is made."""
    segments, alive = Segments(), list[tuple[list[list[int]], list[int]]]()
    for nbytes, freed in steps:
        if freed is not None and freed < len(alive):
            segments.free(*alive.pop(freed))
        segment, block = segments.allocate(nbytes)
        assert nbytes <= block[0] <= cuda_block_bytes(nbytes)
        alive.append((segment, block))


def test_what_is_counted_is_what_a_block_can_have() -> None:
    for nbytes in (MIB + 1, 2 * MIB, 3 * MIB + 700, 11 * MIB):
        segments = Segments()
        larger = segments.allocate(nbytes + MIB)
        segments.allocate(2 * MIB)  # what lies behind it is not free
        segments.free(*larger)
        _, block = segments.allocate(nbytes)
        assert block[0] == cuda_block_bytes(nbytes)


def test_small_blocks_have_no_rest() -> None:
    assert [cuda_block_bytes(nbytes) for nbytes in (0, 1, 512, 513, MIB)] == [0, 512, 512, 1024, MIB]


def test_the_host_counts_bytes_as_they_are() -> None:
    for nbytes in (0, 1, 3 * MIB):
        assert block_bytes(nbytes, "cpu") == nbytes
        assert block_bytes(nbytes, "cuda") == cuda_block_bytes(nbytes)
