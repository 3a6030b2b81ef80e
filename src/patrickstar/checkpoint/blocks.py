"""The memory that a checkpoint's files pass through: two blocks, page aligned as direct I/O wants them."""

from __future__ import annotations

import mmap

__all__ = ["ALIGNMENT", "BLOCK_BYTES", "Blocks"]

ALIGNMENT = 4096  # of offset, size and memory of a direct transfer
BLOCK_BYTES = 4 << 20


class Blocks:
    """Two blocks, one to fill while the other is on its way."""

    def __init__(self, nbytes: int = BLOCK_BYTES) -> None:
        assert nbytes > 0
        assert nbytes % ALIGNMENT == 0
        self.nbytes = nbytes
        # Private: shared anonymous memory would be counted, and kept, as a file's.
        whole = memoryview(mmap.mmap(-1, 2 * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self.views = (whole[:nbytes], whole[nbytes:])
