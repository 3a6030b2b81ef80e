"""`--data`, as tokens and their batches: text, encoded with a part held out, or the word `random`, for benchmarks.

Batches come in an order that the seed alone decides, from any position on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from patrickstar.cli.corpus import DataError, read_corpus
from patrickstar.cli.display import Display
from patrickstar.cli.tokenizer import Tokens, encode, make_tokenizer
from patrickstar.errors import CheckpointError, ConfigError

# Held-out batches of one evaluation: enough to tell a fall from noise, few enough to cost no more than a few steps.
VALIDATION_BATCHES: Final = 4
RANDOM: Final = "random"
RANDOM_TOKENS: Final = 1 << 20

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Data:
    """Tokens to train on, and those held out. Of random ones a model learns nothing: its loss stays near the log of the vocabulary."""

    train: Tokens
    held_out: Tokens
    source: str
    tokenizer: str | None = None


def prepare_data(given: Sequence[str], *, vocab_size: int, own_tokenizer: Path | None, display: Display) -> Data:
    """The tokens of a run, read and encoded, or drawn; says which. ConfigError: `random` beside paths. DataError: see `read_corpus`."""
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


@dataclass(eq=False, kw_only=True)
class Batches:
    """Endless batches of windows of `seq_len` tokens, [batch_size, seq_len] each, shuffled anew in every epoch.

    The state is how many sequences have been given out, with all that must be equal for this to mean the same place. It is that of all ranks.

    Attributes:
        device: of the batches; None: the CPU. rows: those of each batch that are given out here, cut by `shard`; None: all.
    """

    tokens: Tokens = field(kw_only=False)
    batch_size: int
    seq_len: int
    seed: int
    device: torch.device | None = None
    rows: slice | None = None
    shard: Callable[[Batch], Batch] = lambda batch: batch

    def __post_init__(self) -> None:
        self._windows = windows_of(self.tokens, self.seq_len, "training")
        self._identity: dict[str, Any] = {name: getattr(self, name) for name in ("batch_size", "seq_len", "seed")}
        self._identity["tokens"] = hashlib.sha256(self.tokens.tobytes()).hexdigest()
        self._rows = range(self.batch_size)[self.rows or slice(None)]

        self._position = 0

    def next(self) -> Batch:
        """The next batch, in which an epoch may end."""
        count = len(self._windows)
        places = (divmod(self._position + index, count) for index in self._rows)
        rows = self._windows[[int(_order(self.seed, epoch, count)[place]) for epoch, place in places]]
        self._position += self.batch_size
        return self.shard(as_batch(rows, self.device))

    def held_out(self, tokens: Tokens, *, most: int) -> list[Batch]:
        """Batches alike of another text, at most `most`, spread evenly over it, always the same ones. DataError: it is less than one window."""
        windows = windows_of(tokens, self.seq_len, "held-out")
        # A batch smaller than the training one would be another shape to plan for: windows repeat where text is short.
        count = max(1, min(most, len(windows) // self.batch_size)) * self.batch_size
        chosen = torch.tensor([index * len(windows) // count for index in range(count)])
        rows = (windows[of_all[list(self._rows)]] for of_all in chosen.split(self.batch_size))
        return [self.shard(as_batch(own, self.device)) for own in rows]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where the state was taken. CheckpointError: it was taken from other tokens or with other numbers; the message says which."""
        for name, now in self._identity.items():
            then = state.get(name)
            if then != now:
                raise CheckpointError(
                    f"the checkpoint's data order is another: {name} was {then}, is {now}; resume with what it was"
                )
        self._position = int(state["position"])


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> torch.Tensor:
    # A generator of its own: the order must not depend on what the model draws, nor the other way round.
    return torch.randperm(count, generator=torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63)))


def random_tokens(vocab_size: int) -> tuple[Tokens, Tokens]:
    """Random tokens of a vocabulary, always the same ones; those held out second."""
    drawn = np.random.default_rng(0).integers(vocab_size, size=RANDOM_TOKENS, dtype=np.int32)
    return drawn[: -RANDOM_TOKENS // 16], drawn[-RANDOM_TOKENS // 16 :]


def as_batch(rows: torch.Tensor, device: torch.device | None = None) -> Batch:
    """A batch as causal models take it, of windows of tokens, [batch, seq]. The model shifts the labels."""
    ids = rows.to(device, torch.int64)
    return {"input_ids": ids, "labels": ids}


def windows_of(tokens: Tokens, seq_len: int, which: str) -> torch.Tensor:
    """The windows of a text, [windows, seq_len]. `which`: the text, in words. DataError: it is less than one window."""
    count = len(tokens) // seq_len
    if count == 0:
        raise DataError(
            f"the {which} text has {len(tokens)} tokens, less than one sequence of {seq_len}: "
            "give more text, or a smaller --seq-len"
        )
    return torch.from_numpy(tokens[: count * seq_len].reshape(count, seq_len))
