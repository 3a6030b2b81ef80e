"""`--data`, as tokens and their batches: text, encoded with a part held out; or the word `random`, for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from patrickstar.cli.batches import random_tokens
from patrickstar.cli.corpus import read_corpus
from patrickstar.cli.display import Display
from patrickstar.cli.tokenizer import Tokens, encode, make_tokenizer
from patrickstar.errors import ConfigError

RANDOM: Final = "random"


@dataclass(frozen=True, slots=True)
class Data:
    """Tokens to train on, and those held out. Of random ones a model learns nothing: its loss stays near the log of the vocabulary."""

    train: Tokens
    held_out: Tokens
    source: str
    tokenizer: str | None = None

    def row(self) -> dict[str, Any]:
        """Entries for the log."""
        tokens = {"train_tokens": len(self.train), "validation_tokens": len(self.held_out)}
        return {"corpus": self.source, "tokenizer": self.tokenizer, **tokens}


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
        return Data(*random_tokens(vocab_size), "random tokens")
    corpus = read_corpus(given)
    display.note(f"text: {corpus.source}, {corpus.nbytes / 1e6:.1f} MB")
    if corpus.skipped:
        display.note(f"warning: skipped {corpus.skipped} files that are not UTF-8 text")
    tokenizer = make_tokenizer(corpus, vocab_size=vocab_size, own=own_tokenizer)
    with display.progress("encoding text", len(corpus.train) + len(corpus.validation)) as advance:
        train = encode(tokenizer, corpus.train, advance=advance)
        held_out = encode(tokenizer, corpus.validation, advance=advance)
    display.note(f"tokens: {_count(len(train))}, {_count(len(held_out))} held out; {tokenizer.description}")
    return Data(train, held_out, corpus.source, tokenizer.description)


def _count(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e6 else str(count)
