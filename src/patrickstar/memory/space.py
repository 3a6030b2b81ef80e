"""Spaces: memory of one kind, addressed by offsets. What a tier's slots lie in."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from patrickstar.errors import StateError
from patrickstar.memory.mapping import absent_bytes, advise_huge, discard, reserve

__all__ = ["HostSpace", "Space"]


class Space(Protocol):
    """Memory whose addresses are reserved, and whose pages come with their first use.

    Attributes:
        address_range: first address, and the first one past it.
    """

    @property
    def address_range(self) -> tuple[int, int]: ...

    def expect_open(self) -> None:
        """Raises StateError where the memory cannot be used: it has been let go of, or belongs to another process."""

    def buffer(self, at: int, nbytes: int) -> memoryview:
        """Bytes as the system's calls for files take them."""

    def wrapping(self, at: int, nbytes: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        """A function that gives these bytes as a flat tensor over a fresh storage, whose death tells that nothing made from it is left."""

    def fill(self, at: int, nbytes: int, byte: int) -> None:
        """Writes one byte everywhere. A work of a lane."""

    def copy_from(self, other: Space, from_: int, at: int, nbytes: int) -> None:
        """Copies bytes of another space. A work of a lane."""

    def prepare(self, at: int, nbytes: int) -> None:
        """Is told of a range that is used for the first time."""

    def discard(self, at: int, nbytes: int) -> None:
        """Gives the pages of a range back to the system, or keeps them."""

    def absent_bytes(self, at: int, nbytes: int) -> int:
        """Bytes of a range of whole pages that have none yet."""

    def close(self) -> None:
        """Lets go of the memory: it goes with the last tensor or buffer over it."""


class HostSpace:
    """Private anonymous memory of this process."""

    def __init__(self, nbytes: int, *, name: str) -> None:
        self.name = name
        self._owner = os.getpid()

        self._memory: ctypes.Array[ctypes.c_char] | None = reserve(nbytes)
        self._start = ctypes.addressof(self._memory)
        self._nbytes = nbytes

    @property
    def address_range(self) -> tuple[int, int]:
        return self._start, self._start + self._nbytes

    def buffer(self, at: int, nbytes: int) -> memoryview:
        return memoryview(self._open()).cast("B")[at : at + nbytes]

    def wrapping(self, at: int, nbytes: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        # 1 microsecond a call. Not to be called in inference mode: what is made there could neither be saved for backward nor written later.
        return partial(torch.frombuffer, self._open(), dtype=dtype, count=nbytes // dtype.itemsize, offset=at)

    def fill(self, at: int, nbytes: int, byte: int) -> None:
        if self._memory is not None:
            ctypes.memset(self._start + at, byte, nbytes)

    def copy_from(self, other: Space, from_: int, at: int, nbytes: int) -> None:
        self._open()
        ctypes.memmove(self._start + at, other.address_range[0] + from_, nbytes)

    def prepare(self, at: int, nbytes: int) -> None:
        advise_huge(self._start + at, nbytes)

    def discard(self, at: int, nbytes: int) -> None:
        if os.getpid() == self._owner:
            discard(self._start + at, nbytes)

    def absent_bytes(self, at: int, nbytes: int) -> int:
        return absent_bytes(self._start + at, nbytes)

    def close(self) -> None:
        self._memory = None

    def expect_open(self) -> None:
        self._open()

    def _open(self) -> ctypes.Array[ctypes.c_char]:
        if self._memory is None:
            raise StateError(f"the {self.name} arena is closed")
        if os.getpid() != self._owner:
            raise StateError(
                f"the {self.name} arena belongs to process {self._owner}, and this one was forked from it: "
                "use the model in the process that manages it, or start workers with the spawn method"
            )
        return self._memory
