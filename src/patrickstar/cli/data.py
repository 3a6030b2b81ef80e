"""`--data`, as tokens and their batches: text, encoded with a part held out; or the word `random`, for benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from patrickstar.cli.batches import VALIDATION_BATCHES, Batch, Batches, as_batch, position_in, validation_batches
from patrickstar.cli.corpus import read_corpus
from patrickstar.cli.display import Display
from patrickstar.cli.tokenizer import Tokens, encode, make_tokenizer
from patrickstar.errors import ConfigError

RANDOM: Final = "random"

# What is drawn beside a position and the seed, so that no training batch is a validation batch.
_TRAINING, _VALIDATION = 0, 1


def prepare_data(given: Sequence[str], *, vocab_size: int, own_tokenizer: Path | None, display: Display) -> Data:
    """The tokens of a run, read and encoded, or drawn; says which.

    Raises:
        ConfigError: `random` beside paths.
        ConfigError, DataError: see `TextData.prepare`.
    """
    if RANDOM not in given:
        return TextData.prepare(given, vocab_size=vocab_size, own_tokenizer=own_tokenizer, display=display)
    if len(given) > 1:
        raise ConfigError(
            f"--data {' '.join(given)}: {RANDOM} stands for random tokens and goes with nothing else; "
            f"leave it out, or the rest (a file of that name is ./{RANDOM})"
        )
    return RandomData.prepare(vocab_size=vocab_size, display=display)


@dataclass(frozen=True, slots=True)
class TextData:
    """The tokens of a run."""

    train: Tokens
    held_out: Tokens
    tokenizer: str
    source: str

    @classmethod
    def prepare(
        cls, given: Sequence[str], *, vocab_size: int, own_tokenizer: Path | None, display: Display
    ) -> TextData:
        """Reads and encodes text; says what was found.

        Raises:
            ConfigError, DataError: see `read_corpus` and `make_tokenizer`.
        """
        corpus = read_corpus(given)
        display.note(f"text: {corpus.source}, {corpus.nbytes / 1e6:.1f} MB")
        if corpus.skipped:
            display.note(f"warning: skipped {corpus.skipped} files that are not UTF-8 text")
        tokenizer = make_tokenizer(corpus, vocab_size=vocab_size, own=own_tokenizer)
        with display.stage("encoding text", len(corpus.train) + len(corpus.validation)) as advance:
            train = encode(tokenizer, corpus.train, advance=advance)
            held_out = encode(tokenizer, corpus.validation, advance=advance)
        display.note(f"tokens: {_count(len(train))}, {_count(len(held_out))} held out; {tokenizer.description}")
        return cls(train, held_out, tokenizer.description, corpus.source)

    def batches(self, *, batch_size: int, seq_len: int, seed: int) -> Batches:
        return Batches(self.train, batch_size=batch_size, seq_len=seq_len, seed=seed)

    def validation(self, *, batch_size: int, seq_len: int) -> list[Batch]:
        return validation_batches(self.held_out, batch_size=batch_size, seq_len=seq_len, most=VALIDATION_BATCHES)

    def row(self) -> dict[str, Any]:
        """Entries for the log."""
        return {
            "corpus": self.source,
            "tokenizer": self.tokenizer,
            "train_tokens": len(self.train),
            "validation_tokens": len(self.held_out),
        }


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
        """Batches of other random tokens than training has, the same ones in every run."""
        shape = (batch_size, seq_len)
        return [_draw(self.vocab_size, shape, seed=0, stream=_VALIDATION, at=at) for at in range(VALIDATION_BATCHES)]

    def row(self) -> dict[str, Any]:
        """Entries for the log."""
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


Data = TextData | RandomData


def _count(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e6 else str(count)


def _draw(vocab_size: int, shape: tuple[int, int], *, seed: int, stream: int, at: int) -> Batch:
    # A generator of its own, made anew: any position can be come back to, and what the model draws stays what it was.
    mixed = ((seed * 1_000_003 + at) * 2 + stream) % (1 << 63)
    return as_batch(torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(mixed)))
