"""`--data`, as tokens and their batches: text, encoded with a part held out; or the word `random`, for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from patrickstar.cli.batches import VALIDATION_BATCHES, Batch, Batches, BatchSource, RandomBatches, validation_batches
from patrickstar.cli.corpus import read_corpus
from patrickstar.cli.display import Display
from patrickstar.cli.tokenizer import Tokens, encode, make_tokenizer
from patrickstar.errors import ConfigError

RANDOM: Final = "random"


@dataclass(frozen=True, slots=True)
class Data:
    """Tokens of a text, those held out second; or random ones (None): a model's loss begins near the log of its vocabulary, and stays there."""

    vocab_size: int
    text: tuple[Tokens, Tokens] | None = None
    source: str = "random tokens"
    tokenizer: str | None = None

    def batches(self, **shape: Any) -> BatchSource:
        return RandomBatches(self.vocab_size, **shape) if self.text is None else Batches(self.text[0], **shape)

    def validation(self, **shape: Any) -> list[Batch]:
        if self.text is None:
            source = RandomBatches(self.vocab_size, held_out=True, seed=0, **shape)
            return [source.next() for _ in range(VALIDATION_BATCHES)]
        return validation_batches(self.text[1], most=VALIDATION_BATCHES, **shape)

    def row(self) -> dict[str, Any]:
        """Entries for the log."""
        train, held_out = (None, None) if self.text is None else map(len, self.text)
        about = {"corpus": self.source, "tokenizer": self.tokenizer}
        return {**about, "train_tokens": train, "validation_tokens": held_out}


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
        return Data(vocab_size)
    corpus = read_corpus(given)
    display.note(f"text: {corpus.source}, {corpus.nbytes / 1e6:.1f} MB")
    if corpus.skipped:
        display.note(f"warning: skipped {corpus.skipped} files that are not UTF-8 text")
    tokenizer = make_tokenizer(corpus, vocab_size=vocab_size, own=own_tokenizer)
    with display.progress("encoding text", len(corpus.train) + len(corpus.validation)) as advance:
        train = encode(tokenizer, corpus.train, advance=advance)
        held_out = encode(tokenizer, corpus.validation, advance=advance)
    display.note(f"tokens: {_count(len(train))}, {_count(len(held_out))} held out; {tokenizer.description}")
    return Data(vocab_size, (train, held_out), corpus.source, tokenizer.description)


def _count(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e6 else str(count)
