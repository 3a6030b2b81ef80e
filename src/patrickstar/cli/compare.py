"""`--compare-plain`: whether a managed run and the same steps in plain PyTorch (`plain.py`) have the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from patrickstar.checkpoint import rng
from patrickstar.cli.plain import PlainRun, Scaling


@dataclass(frozen=True, slots=True)
class ManagedRun:
    """A managed run to compare with: its losses step by step, digests of its final state, and the random numbers at its beginning (`rng.capture`)."""

    losses: Sequence[float]
    final: Mapping[str, str]
    random_state: Mapping[str, Any]
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between a managed run and the plain one: steps whose losses differ, from 1, and names of final tensors that do or that one lacks.

    Attributes:
        scaling: of losses, managed and plain; None: they were not scaled.
    """

    losses: tuple[int, ...]
    tensors: tuple[str, ...]
    compared: int
    scaling: tuple[Scaling | None, Scaling | None]

    @property
    def equal(self) -> bool:
        return not self.losses and not self.tensors and self.scaling[0] == self.scaling[1]

    def __str__(self) -> str:
        managed, plain = self.scaling
        if self.equal:
            scaled = f", and {plain}" if plain is not None else ""
            return f"plain PyTorch gives the same bits: every loss and all {self.compared} tensors of the final state{scaled}"
        parts = []
        if self.losses:
            parts.append(f"{len(self.losses)} losses, first at step {self.losses[0]}")
        if self.tensors:
            parts.append(f"{len(self.tensors)} of {self.compared} final tensors, first {self.tensors[0]}")
        if managed != plain:
            parts.append(f"{plain or 'no loss scale'}, where the run has {managed or 'none'}")
        return f"plain PyTorch gives other bits: {'; '.join(parts)}"


def digests(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """A digest of every tensor's bytes, read one at a time: the weights of a managed model need not fit twice."""
    return {name: digest(state[name]) for name in state}


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 over type, shape and bytes of a tensor, in hexadecimal digits."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + data.tobytes()).hexdigest()


def compare_plain(run: PlainRun, managed: ManagedRun, *, advance: Callable[[int], None]) -> Comparison:
    """Runs as many steps as the managed run has losses, from the same random numbers, and says what differs."""
    rng.restore(managed.random_state)
    different: list[int] = []
    for number, loss in enumerate(managed.losses, start=1):
        # Bits, not values: NaN equals NaN here, and -0.0 does not equal 0.0.
        if run.step().hex() != loss.hex():
            different.append(number)
        advance(1)
    plain, final = digests(run.state_dict()), managed.final
    tensors = sorted({name for name, _ in plain.items() ^ final.items()})
    return Comparison(
        tuple(different), tuple(tensors), len(plain.keys() | final.keys()), (managed.scaling, run.scaling)
    )
