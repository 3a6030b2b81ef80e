"""Tokens as batches, in an order that the seed alone decides, from any position on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, Protocol

import torch

from patrickstar.cli.corpus import DataError
from patrickstar.cli.tokenizer import Tokens
from patrickstar.errors import CheckpointError

# Held-out batches of one evaluation: enough to tell a fall from noise, few enough to cost no more than a few steps.
VALIDATION_BATCHES: Final = 4

Batch = dict[str, torch.Tensor]


class BatchSource(Protocol):
    """Endless batches, [batch_size, seq_len] tokens each, whose place can be kept and come back to."""

    batch_size: int
    seq_len: int

    def next(self) -> Batch: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Batches:
    """Endless batches of windows of `seq_len` tokens, shuffled anew in every epoch.

    A batch is what Hugging Face's causal models take: `labels` are the `input_ids` themselves, the model shifts them.
    The state is how many windows have been given out, with all that must be equal for this to mean the same place.
    """

    def __init__(self, tokens: Tokens, *, batch_size: int, seq_len: int, seed: int) -> None:
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.seed = seed
        self.windows = len(tokens) // seq_len
        self._tokens = torch.from_numpy(tokens[: self.windows * seq_len].reshape(self.windows, seq_len))
        self._digest = hashlib.sha256(tokens.tobytes()).hexdigest()
        if self.windows == 0:
            raise DataError(f"the training text has {len(tokens)} tokens, less than one sequence of {seq_len}")

        self.position = 0
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def next(self) -> Batch:
        """The next batch, in which an epoch may end."""
        rows = [self._row(self.position + index) for index in range(self.batch_size)]
        self.position += self.batch_size
        return as_batch(self._tokens[torch.tensor(rows)])

    def _row(self, position: int) -> int:
        epoch, place = divmod(position, self.windows)
        if epoch != self._epoch:
            # A generator of its own: the order must not depend on what the model draws, nor the other way round.
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % (1 << 63))
            self._order, self._epoch = torch.randperm(self.windows, generator=generator), epoch
        return int(self._order[place])

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where the state was taken.

        Raises:
            CheckpointError: it was taken from other text or with other numbers; the message says which.
        """
        self.position = position_in(state, self._identity())

    def _identity(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "seq_len": self.seq_len, "seed": self.seed, "tokens": self._digest}


class BatchesOn:
    """Batches of another source, on the device that computes."""

    def __init__(self, source: BatchSource, device: torch.device) -> None:
        self.batch_size = source.batch_size
        self.seq_len = source.seq_len
        self._source = source
        self._device = device

    def next(self) -> Batch:
        return on_device(self._source.next(), self._device)

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device. What is one tensor there is one here."""
    moved = {id(tensor): tensor.to(device) for tensor in batch.values()}
    return {name: moved[id(tensor)] for name, tensor in batch.items()}


def position_in(state: Mapping[str, Any], identity: Mapping[str, Any]) -> int:
    """The position of a state, if it is of the same data in the same order.

    Raises:
        CheckpointError: it is not; the message says in what.
    """
    for name, now in identity.items():
        then = state.get(name)
        if then != now:
            raise CheckpointError(
                f"the checkpoint's data order is another: {name} was {then}, is {now}; resume with what it was"
            )
    return int(state["position"])


def as_batch(rows: torch.Tensor) -> Batch:
    """A batch as causal models take it, of windows of tokens, [batch, seq]."""
    ids = rows.to(torch.int64)
    return {"input_ids": ids, "labels": ids}


def validation_batches(tokens: Tokens, *, batch_size: int, seq_len: int, most: int) -> list[Batch]:
    """Batches of held-out windows, at most `most`, spread evenly over the held-out text; always the same ones.

    Raises:
        DataError: less than one window of text.
    """
    windows = len(tokens) // seq_len
    if windows == 0:
        raise DataError(
            f"the held-out text has {len(tokens)} tokens, less than one sequence of {seq_len}: "
            "give more text, or a smaller --seq-len"
        )
    rows = torch.from_numpy(tokens[: windows * seq_len].reshape(windows, seq_len))
    # A batch smaller than the training one would be another shape to plan for: windows repeat where text is short.
    count = max(1, min(most, windows // batch_size))
    chosen = [index * windows // (count * batch_size) for index in range(count * batch_size)]
    return [
        as_batch(rows[torch.tensor(chosen[start : start + batch_size])]) for start in range(0, len(chosen), batch_size)
    ]
