"""From `--data` to batches: the corpus read, a tokenizer made for the model, everything encoded, a part held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patrickstar.cli.batches import VALIDATION_BATCHES, Batch, Batches, validation_batches
from patrickstar.cli.corpus import read_corpus
from patrickstar.cli.display import Display
from patrickstar.cli.tokenizer import Tokens, encode, make_tokenizer


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
        """Reads and encodes; says what it found.

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
        """For the log."""
        return {
            "corpus": self.source,
            "tokenizer": self.tokenizer,
            "train_tokens": len(self.train),
            "validation_tokens": len(self.held_out),
        }


def _count(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e6 else str(count)
