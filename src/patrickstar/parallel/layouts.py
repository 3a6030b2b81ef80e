"""Layouts of a sequence over ranks: which tokens each has, and what of a block of keys its queries see.

contiguous  rank r of N has the r-th part. Where tokens see those before them only, the last rank computes most.
zigzag      of 2N parts it has the r-th and the (2N-1-r)-th: then all ranks compute as much, in every step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Name = Literal["zigzag", "contiguous"]
ALL = slice(None)


@dataclass(frozen=True, slots=True)
class SeenBlock:
    """Queries and keys of which each sees each, of what two ranks have; with `is_causal` those that are not after it."""

    queries: slice
    keys: slice
    is_causal: bool = False


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """A layout over `size` ranks."""

    name: Name
    size: int

    @property
    def multiple(self) -> int:
        """Number by which lengths are divisible."""
        return self.size if self.name == "contiguous" or self.size == 1 else 2 * self.size

    def positions(self, rank: int, length: int) -> Tensor:
        """The positions [L/N] of a sequence that a rank has, in its order."""
        if self.name == "contiguous":
            return torch.arange(length).view(self.size, -1)[rank]
        parts = torch.arange(length).view(2 * self.size, -1)
        return torch.cat([parts[rank], parts[-1 - rank]])

    def block(self, rank: int, source: int, local: int, *, is_causal: bool) -> SeenBlock | None:
        """The part of the keys of `source` that queries of `rank` see, where each has `local` tokens; None: nothing of them."""
        if not is_causal:
            return SeenBlock(ALL, ALL)
        if source == rank:  # its tokens are in the order of their positions
            return SeenBlock(ALL, ALL, is_causal=True)
        if self.name == "contiguous":
            return SeenBlock(ALL, ALL) if source < rank else None
        # Zigzag. The early half of those before comes before both of mine, their late half after both; of those behind both lie between mine.
        return SeenBlock(ALL, slice(local // 2)) if source < rank else SeenBlock(slice(local // 2, None), ALL)

    def halves(self, local: int, *, is_causal: bool) -> tuple[list[SeenBlock], list[SeenBlock]]:
        """The block of a rank's own `local` tokens, in two parts of equal work; of one rank, all of it in the first."""
        early, late = slice(local // 2), slice(local // 2, None)
        if self.size == 1 or local < 2:
            return [SeenBlock(ALL, ALL, is_causal)], []
        if is_causal:
            return [SeenBlock(late, early)], [
                SeenBlock(early, early, is_causal=True),
                SeenBlock(late, late, is_causal=True),
            ]
        return [SeenBlock(early, ALL)], [SeenBlock(late, ALL)]
