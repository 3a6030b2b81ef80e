"""`--data random`: tokens drawn at random, for benchmarks. No corpus is read and no tokenizer is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from patrickstar.cli.batches import VALIDATION_BATCHES, Batch, as_batch, position_in
from patrickstar.cli.display import Display

# What is drawn beside a position and the seed, so that no training batch is a validation batch.
_TRAINING, _VALIDATION = 0, 1


@dataclass(frozen=True, slots=True)
class RandomData:
    """Every token as likely as any other: a model's loss begins near the log of its vocabulary, and stays there."""

    vocab_size: int

    @classmethod
    def prepare(cls, *, vocab_size: int, display: Display) -> RandomData:
        display.note(f"random tokens of a vocabulary of {vocab_size}: for benchmarks, there is nothing to learn")
        return cls(vocab_size)

    def batches(self, *, batch_size: int, seq_len: int, seed: int) -> RandomBatches:
        return RandomBatches(self.vocab_size, batch_size=batch_size, seq_len=seq_len, seed=seed)

    def validation(self, *, batch_size: int, seq_len: int) -> list[Batch]:
        """Other random tokens, the same ones in every run."""
        shape = (batch_size, seq_len)
        return [_draw(self.vocab_size, shape, seed=0, stream=_VALIDATION, at=at) for at in range(VALIDATION_BATCHES)]

    def row(self) -> dict[str, Any]:
        """For the log."""
        return {"corpus": "random tokens", "tokenizer": None, "train_tokens": None, "validation_tokens": None}


class RandomBatches:
    """Endless batches of random tokens; the seed and the position decide each one, and nothing else does.

    The state is how many batches have been given out, with all that must be equal for this to mean the same place.
    """

    def __init__(self, vocab_size: int, *, batch_size: int, seq_len: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.seed = seed

        self.position = 0

    def next(self) -> Batch:
        shape = (self.batch_size, self.seq_len)
        batch = _draw(self.vocab_size, shape, seed=self.seed, stream=_TRAINING, at=self.position)
        self.position += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where the state was taken.

        Raises:
            CheckpointError: it was taken from text or with other numbers; the message says which.
        """
        self.position = position_in(state, self._identity())

    def _identity(self) -> dict[str, Any]:
        tokens = f"random of a vocabulary of {self.vocab_size}"
        return {"batch_size": self.batch_size, "seq_len": self.seq_len, "seed": self.seed, "tokens": tokens}


def _draw(vocab_size: int, shape: tuple[int, int], *, seed: int, stream: int, at: int) -> Batch:
    # A generator of its own, made anew: any position can be come back to, and what the model draws stays what it was.
    mixed = ((seed * 1_000_003 + at) * 2 + stream) % (1 << 63)
    return as_batch(torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(mixed)))
