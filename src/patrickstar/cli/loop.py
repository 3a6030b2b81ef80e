"""The training loop: an ordinary PyTorch loop on a session, with a row for every step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from patrickstar.cli.batches import BatchSource
from patrickstar.cli.checkpoints import CheckpointFolder
from patrickstar.cli.display import Display, TrainingView
from patrickstar.cli.event_log import EventLog, StepRecord
from patrickstar.cli.losses import accumulate_gradients
from patrickstar.cli.resident import ResidentGrowth
from patrickstar.cli.stop import StopSignals

if TYPE_CHECKING:
    from patrickstar import Session


@dataclass(frozen=True, slots=True)
class Course:
    """A run's length, and what to do on the way."""

    steps: int
    accumulate: int
    clip: float | None
    save_every: int | None
    checkpoints: CheckpointFolder | None


@dataclass(slots=True)
class Progress:
    """A run's place, and what the run has seen."""

    step: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    first_validation_loss: float | None = None
    validation_loss: float | None = None

    seconds: float = 0.0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    """Of this process's steps."""
    moved_per_step: Mapping[str, int] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _REMEMBERED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _REMEMBERED:
            setattr(self, name, state[name])


# Of a run, what it must know of its beginning when it goes on in another process.
_REMEMBERED: Final = ("step", "first_loss", "last_loss", "first_validation_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """All that a run works on."""

    model: nn.Module
    session: Session
    scheduler: LRScheduler
    batches: BatchSource
    course: Course
    progress: Progress
    growth: ResidentGrowth
    log: EventLog
    display: Display
    signals: StopSignals

    def run(self, view: TrainingView) -> None:
        """Steps to the end, or until a signal asks to stop; saves what was promised either way."""
        progress, course = self.progress, self.course
        saved = progress.step
        with self.signals.deferring(self.display.note), self.display.training(view) as show:
            while progress.step < course.steps and self.signals.requested is None:
                record = self._step()
                self.log.write(record.row())
                view.step(record, held=self._held(record))
                show()
                if course.save_every and progress.step % course.save_every == 0:
                    self._save()
                    saved = progress.step
            if saved != progress.step:
                self._save()

    def resume(self) -> None:
        """Goes on from the newest checkpoint, which there is.

        Raises:
            CheckpointError: it is damaged, or of another model or other data.
        """
        assert self.course.checkpoints is not None
        extra = self.course.checkpoints.load(self.session)
        self.batches.load_state_dict(extra["batches"])
        self.scheduler.load_state_dict(extra["scheduler"])
        self.progress.load_state_dict(extra["progress"])

    def _step(self) -> StepRecord:
        session, progress = self.session, self.progress
        assert session.optimizer is not None
        before = session.stats()
        started = time.perf_counter()
        scaler = session.scaler
        loss = accumulate_gradients(self.model, self.batches, self.course.accumulate, scale=scaler.scale)
        if self.course.clip is not None:
            scaler.unscale_(session.optimizer)
        # What `manage(max_grad_norm=)` does at every step, here for the norm that it gives.
        norm = None if self.course.clip is None else float(session.clip_grad_norm_(self.course.clip))
        scaler.step(session.optimizer)
        scaler.update()
        session.optimizer.zero_grad()
        seconds = time.perf_counter() - started
        tokens = self.batches.batch_size * self.batches.seq_len * self.course.accumulate

        stats = session.stats()
        if stats.steps > before.steps:  # in fp16 a step may be skipped
            self.scheduler.step()
        progress.step += 1
        progress.first_loss = loss if progress.first_loss is None else progress.first_loss
        progress.last_loss = loss
        progress.losses.append(loss)
        progress.seconds += seconds
        progress.tokens += tokens
        progress.moved_per_step = {link: nbytes - before.moved.get(link, 0) for link, nbytes in stats.moved.items()}
        return StepRecord(
            step=progress.step,
            loss=loss,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            grad_norm=norm,
            peak=dict(stats.peak),
            rss=self.growth.resident(),
        )

    def _held(self, record: StepRecord) -> Mapping[str, int]:
        """Bytes that each tier holds now: the process itself shows the host's, the session's peaks those of the others."""
        return {**record.peak, "host": self.growth.now()}

    def _save(self) -> None:
        if self.course.checkpoints is not None:
            extra = {"batches": self.batches, "scheduler": self.scheduler, "progress": self.progress}
            where = self.course.checkpoints.save(self.session, extra=extra)
            self.display.note(f"saved {where}")
