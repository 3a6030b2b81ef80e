"""`--data`, as tokens and their batches: text, encoded with a part held out; or the word `random`, for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from patrickstar.cli.batches import (
    VALIDATION_BATCHES,
    Batch,
    Batches,
    BatchSource,
    RandomBatches,
    random_validation_batches,
    validation_batches,
)
from patrickstar.cli.corpus import read_corpus
from patrickstar.cli.display import Display
from patrickstar.cli.tokenizer import Tokens, encode, make_tokenizer
from patrickstar.errors import ConfigError

RANDOM: Final = "random"


@dataclass(frozen=True, slots=True)
class TextData:
    """The tokens of a text."""

    train: Tokens
    held_out: Tokens
    tokenizer: str
    source: str

    def batches(self, **shape: Any) -> BatchSource:
        return Batches(self.train, **shape)

    def validation(self, **shape: Any) -> list[Batch]:
        return validation_batches(self.held_out, most=VALIDATION_BATCHES, **shape)

    def row(self) -> dict[str, Any]:
        """Entries for the log."""
        counts = {"train_tokens": len(self.train), "validation_tokens": len(self.held_out)}
        return {"corpus": self.source, "tokenizer": self.tokenizer, **counts}


@dataclass(frozen=True, slots=True)
class RandomData:
    """Every token as likely as any other: a model's loss begins near the log of its vocabulary, and stays there."""

    vocab_size: int

    def batches(self, **shape: Any) -> BatchSource:
        return RandomBatches(self.vocab_size, **shape)

    def validation(self, **shape: Any) -> list[Batch]:
        return random_validation_batches(self.vocab_size, **shape)

    def row(self) -> dict[str, Any]:
        """Entries for the log."""
        return {"corpus": "random tokens", "tokenizer": None, "train_tokens": None, "validation_tokens": None}


Data = TextData | RandomData


def prepare_data(given: Sequence[str], *, vocab_size: int, own_tokenizer: Path | None, display: Display) -> Data:
    """The tokens of a run, read and encoded, or drawn; says which.

    Raises:
        ConfigError: `random` beside paths.
        ConfigError, DataError: see `read_corpus` and `make_tokenizer`.
    """
    if RANDOM in given:
        if len(given) > 1:
            raise ConfigError(
                f"--data {' '.join(given)}: {RANDOM} stands for random tokens and goes with nothing else; "
                f"leave it out, or the rest (a file of that name is ./{RANDOM})"
            )
        display.note(f"random tokens of a vocabulary of {vocab_size}: for benchmarks, there is nothing to learn")
        return RandomData(vocab_size)
    corpus = read_corpus(given)
    display.note(f"text: {corpus.source}, {corpus.nbytes / 1e6:.1f} MB")
    if corpus.skipped:
        display.note(f"warning: skipped {corpus.skipped} files that are not UTF-8 text")
    tokenizer = make_tokenizer(corpus, vocab_size=vocab_size, own=own_tokenizer)
    with display.progress("encoding text", len(corpus.train) + len(corpus.validation)) as advance:
        train = encode(tokenizer, corpus.train, advance=advance)
        held_out = encode(tokenizer, corpus.validation, advance=advance)
    display.note(f"tokens: {_count(len(train))}, {_count(len(held_out))} held out; {tokenizer.description}")
    return TextData(train, held_out, tokenizer.description, corpus.source)


def _count(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e6 else str(count)
