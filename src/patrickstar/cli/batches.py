"""Tokens as batches, in an order that the seed alone decides, from any position on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import torch

from patrickstar.cli.corpus import DataError
from patrickstar.cli.tokenizer import Tokens
from patrickstar.errors import CheckpointError

# Held-out batches of one evaluation: enough to tell a fall from noise, few enough to cost no more than a few steps.
VALIDATION_BATCHES: Final = 4

Batch = dict[str, torch.Tensor]


class BatchSource:
    """Endless batches, [batch_size, seq_len] tokens each, as Hugging Face's causal models take them.

    The state is how many sequences have been given out, with all that must be equal for this to mean the same place.
    """

    def __init__(
        self, tokens: str, *, batch_size: int, seq_len: int, seed: int, device: torch.device | None = None
    ) -> None:
        """Begins at the beginning. `tokens`: what tells these tokens from all others. `device`: of the batches; None: the CPU."""
        self.tokens = tokens
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.seed = seed
        self._device = device

        self.position = 0

    def next(self) -> Batch:
        """The next batch, in which an epoch may end."""
        batch = as_batch(self._rows(), self._device)
        self.position += self.batch_size
        return batch

    def _rows(self) -> torch.Tensor:
        """The tokens at the position, [batch_size, seq_len]."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where the state was taken.

        Raises:
            CheckpointError: it was taken from other tokens or with other numbers; the message says which.
        """
        for name, now in self._identity().items():
            then = state.get(name)
            if then != now:
                raise CheckpointError(
                    f"the checkpoint's data order is another: {name} was {then}, is {now}; resume with what it was"
                )
        self.position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "seq_len": self.seq_len, "seed": self.seed, "tokens": self.tokens}


class Batches(BatchSource):
    """Windows of `seq_len` tokens of a text, shuffled anew in every epoch."""

    def __init__(self, tokens: Tokens, **shape: Any) -> None:
        super().__init__(hashlib.sha256(tokens.tobytes()).hexdigest(), **shape)
        self._windows = _windows(tokens, self.seq_len, "training")

    def _rows(self) -> torch.Tensor:
        count = len(self._windows)
        places = (divmod(self.position + index, count) for index in range(self.batch_size))
        return self._windows[[int(_order(self.seed, epoch, count)[place]) for epoch, place in places]]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> torch.Tensor:
    # A generator of its own: the order must not depend on what the model draws, nor the other way round.
    return torch.randperm(count, generator=torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63)))


class RandomBatches(BatchSource):
    """Random tokens; the seed and the position decide each batch, and nothing else does. `held_out`: others than training has."""

    def __init__(self, vocab_size: int, *, held_out: bool = False, **shape: Any) -> None:
        super().__init__(f"random of a vocabulary of {vocab_size}", **shape)
        self.vocab_size = vocab_size
        self._held_out = held_out

    def _rows(self) -> torch.Tensor:
        # A generator of its own, made anew: any position can be come back to, and what the model draws stays what it was.
        mixed = (self.seed * 1_000_003 + self.position // self.batch_size) * 2 + self._held_out
        generator = torch.Generator().manual_seed(mixed % (1 << 63))
        return torch.randint(self.vocab_size, (self.batch_size, self.seq_len), generator=generator)


def as_batch(rows: torch.Tensor, device: torch.device | None = None) -> Batch:
    """A batch as causal models take it, of windows of tokens, [batch, seq]. The model shifts the labels."""
    ids = rows.to(device, torch.int64)
    return {"input_ids": ids, "labels": ids}


def validation_batches(
    tokens: Tokens, *, batch_size: int, seq_len: int, most: int, device: torch.device | None = None
) -> list[Batch]:
    """Batches of held-out windows, at most `most`, spread evenly over the held-out text; always the same ones.

    Raises:
        DataError: less than one window of text.
    """
    windows = _windows(tokens, seq_len, "held-out")
    # A batch smaller than the training one would be another shape to plan for: windows repeat where text is short.
    count = max(1, min(most, len(windows) // batch_size))
    chosen = [index * len(windows) // (count * batch_size) for index in range(count * batch_size)]
    return [as_batch(windows[rows], device) for rows in torch.tensor(chosen).split(batch_size)]


def _windows(tokens: Tokens, seq_len: int, which: str) -> torch.Tensor:
    count = len(tokens) // seq_len
    if count == 0:
        raise DataError(
            f"the {which} text has {len(tokens)} tokens, less than one sequence of {seq_len}: "
            "give more text, or a smaller --seq-len"
        )
    return torch.from_numpy(tokens[: count * seq_len].reshape(count, seq_len))
