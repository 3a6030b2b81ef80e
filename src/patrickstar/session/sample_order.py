"""The order of samples, the same for any number of ranks: one permutation an epoch, cut by a running number, over the ends of epochs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


def keyed_seed(*key: int) -> int:
    """A seed for torch's random numbers, of 63 bits, that depends on these numbers and nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


@dataclass(slots=True)
class SampleOrder:
    """The order in which the samples of a dataset of `size` are seen, epoch after epoch. Nothing is lost at the end of one, and nothing repeated."""

    size: int
    seed: int
    _epoch: int = field(default=-1, init=False)
    _permutation: Sequence[int] = field(default=(), init=False)

    def indices(self, first: int, count: int) -> list[int]:
        """The indices of samples number `first` to `first + count - 1`, counted from the beginning of training."""
        return list(self._from(first, count))

    def _from(self, first: int, count: int) -> Iterator[int]:
        for number in range(first, first + count):
            epoch, place = divmod(number, self.size)
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(keyed_seed(self.seed, epoch))
                self._epoch, self._permutation = epoch, torch.randperm(self.size, generator=generator).tolist()
            yield self._permutation[place]


@dataclass(frozen=True, slots=True)
class Draw:
    """The samples of one part of a step, and the seed of what is drawn while they are made."""

    seed: int
    indices: Sequence[int]


@dataclass(frozen=True, slots=True)
class DrawnSamples:
    """A map-style dataset as a `DataLoader` sees it, which asks for all samples of a `Draw` at once."""

    dataset: Any

    def __getitems__(self, draw: Draw) -> list[Any]:  # noqa: PLW3201  (torch's name for it)
        """The samples of a part. What the dataset draws by torch depends on the part alone, not on the process that draws it."""
        torch.manual_seed(draw.seed)
        many = getattr(self.dataset, "__getitems__", None)
        return list(many(list(draw.indices))) if many is not None else [self.dataset[index] for index in draw.indices]
