"""The order of samples, the same for any number of ranks: one permutation an epoch, cut by a running number, over the ends of epochs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

LR_SCALING: Final[Mapping[str, Callable[[float], float]]] = MappingProxyType({"sqrt": math.sqrt, "linear": float})
"""Factors of learning rates for a batch of so many times the first one."""


def keyed_seed(*key: int) -> int:
    """A seed for torch's random numbers, of 63 bits, that depends on these numbers and nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(tuple(map(int, key))).encode(), digest_size=8).digest(), "little") >> 1


@dataclass(slots=True)
class SampleOrder:
    """The order in which the samples of a dataset of `size` are seen, epoch after epoch. Nothing is lost at the end of one, and nothing repeated."""

    size: int
    seed: int
    _epoch: int = field(default=-1, init=False)
    _permutation: Sequence[int] = field(default=(), init=False)

    def indices(self, first: int, count: int) -> list[int]:
        """The indices of samples number `first` to `first + count - 1`, counted from the beginning of training."""
        found = []
        for number in range(first, first + count):
            epoch, place = divmod(number, self.size)
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(keyed_seed(self.seed, epoch))
                self._epoch, self._permutation = epoch, torch.randperm(self.size, generator=generator).tolist()
            found.append(self._permutation[place])
        return found


@dataclass(frozen=True, slots=True)
class Draw:
    """The samples of one part of a step, and the seed of what is drawn while they are made."""

    seed: int
    indices: Sequence[int]


@dataclass(frozen=True, slots=True)
class Draws:
    """Draws of the parts of all steps.

    Attributes:
        each: samples of a part. batches: (step, samples of each step from there on), by step, the first at step 0.
        total: number of steps; None: as many as see `samples` samples.
        lr_scaling: the factor of learning rates for a batch of so many times the first one. warm_up: samples in which a factor moves to the next.
    """

    order: SampleOrder
    each: int
    batches: Sequence[tuple[int, int]]
    seed: int
    steps: int | None = None
    samples: float = 0.0
    lr_scaling: Callable[[float], float] = float
    warm_up: int = 0

    @property
    def total(self) -> int:
        """Number of steps."""
        begins, batch = self.batches[-1]
        return self.steps or begins + math.ceil((self.samples - self.first(begins)) / batch)

    def parts(self, step: int) -> int:
        """Number of parts of a step."""
        return self._batches(step)[-1][1] // self.each

    def first(self, step: int) -> int:
        """The number of the first sample of a step."""
        begun = [*self._batches(step), (step, 0)]
        return sum(batch * (end - begins) for (begins, batch), (end, _) in pairwise(begun))

    def lr_factor(self, step: int) -> float:
        """The factor of learning rates in a step."""
        *before, (begins, batch) = self._batches(step)
        factor = self.lr_scaling(batch / self.batches[0][1])
        seen = self.first(step) - self.first(begins)
        if not before or seen >= self.warm_up:
            return factor
        last = replace(self, batches=before).lr_factor(begins)
        return last + (factor - last) * seen / self.warm_up

    def _batches(self, step: int) -> list[tuple[int, int]]:
        return [(begins, batch) for begins, batch in self.batches if begins <= step]

    def seed_of(self, step: int, part: int) -> int:
        """The seed of a part."""
        return keyed_seed(self.seed, step, part)

    def of_rank(self, step: int, rank: int, size: int) -> Iterator[Draw]:
        """The draws of one of so many ranks, from a step on."""
        for at in range(step, self.total):
            for part in range(rank, self.parts(at), size):
                yield Draw(self.seed_of(at, part), self.order.indices(self.first(at) + part * self.each, self.each))


@dataclass(frozen=True, slots=True)
class DrawnSamples:
    """A map-style dataset as a `DataLoader` sees it, which asks for all samples of a `Draw` at once."""

    dataset: Any

    def __getitems__(self, draw: Draw) -> list[Any]:
        """The samples of a part. What the dataset draws by torch depends on the part alone, not on the process that draws it."""
        torch.manual_seed(draw.seed)
        many = getattr(self.dataset, "__getitems__", None)
        return list(many(list(draw.indices))) if many is not None else [self.dataset[index] for index in draw.indices]


def load_batches(
    draws: Iterator[Draw], dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, num_workers: int
) -> Iterator[Any]:
    """The batches of these draws, as torch's `DataLoader` makes them. Numbers that it draws for itself are not the program's."""
    loader: DataLoader[Any] = DataLoader(
        DrawnSamples(dataset),  # type: ignore[arg-type]  # asked for many at once alone
        batch_sampler=draws,  # type: ignore[arg-type]  # of draws
        collate_fn=collate_fn,
        num_workers=num_workers,
        generator=torch.Generator(),
    )
    return iter(loader)
