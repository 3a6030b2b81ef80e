"""Settings that a config comes to: frozen, checked, in our words."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from patrickstar.config.arguments import MemoryOptions
from patrickstar.config.engine.schedules import Schedule

__all__ = ["EngineSettings", "Note", "OptimizerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Adam's settings: how the update is done."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    """True: the weight shrinks by itself (AdamW). False: the decay is added to the gradient (L2)."""


@dataclass(frozen=True, slots=True)
class Note:
    """A note that a user should have of a config that is taken: told once."""

    text: str
    loud: bool = False

    @property
    def level(self) -> int:
        """The level of `logging` that the note is told at."""
        return logging.WARNING if self.loud else logging.INFO


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """A config as a whole.

    Attributes:
        optimizer: lr is the base of a schedule that follows it. schedule: None: the learning rate stays.
        accumulate: micro-batches of a step. micro_batch_size: samples of each; None: the config does not say.
        memory: the arguments of `manage`: precision, clipping, loss scale and accumulation are in it.
        chunk_hint: elements that a chunk should not exceed. device_share: the budget of a GPU, such as "90%", where one computes.
        steps_per_print: how often the engine tells of progress; None: never.
        said: the paths of the honoured keys that it has, and of its objects.
        notes: keys without effect and choices that were made, to be told.
    """

    optimizer: OptimizerSettings
    schedule: Schedule | None
    accumulate: int
    micro_batch_size: int | None
    memory: MemoryOptions
    chunk_hint: int | None
    device_share: str | None
    steps_per_print: int | None
    said: frozenset[str]
    notes: tuple[Note, ...]

    def tell(self, log: logging.Logger) -> None:
        """Logs the notes."""
        for note in self.notes:
            log.log(note.level, "config: %s", note.text)
