"""The training loop: an ordinary PyTorch loop on a session, with a row for every step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from patrickstar.cli.batches import BatchSource
from patrickstar.cli.display import Budgets, Display, step_text
from patrickstar.cli.event_log import EventLog, StepRecord
from patrickstar.cli.losses import accumulate_gradients
from patrickstar.cli.request import Request
from patrickstar.cli.resident import ResidentGrowth
from patrickstar.cli.stop import StopSignals

if TYPE_CHECKING:
    from patrickstar import Session


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

    request: Request
    model: nn.Module
    session: Session
    scheduler: LRScheduler
    batches: BatchSource
    progress: Progress
    growth: ResidentGrowth
    log: EventLog
    display: Display
    signals: StopSignals

    def run(self, *, budgets: Budgets) -> None:
        """Steps to the end, or until a signal asks to stop; saves what was promised either way."""
        progress, request = self.progress, self.request
        saved = progress.step
        shown = self.display.progress("step", request.steps, done=progress.step)
        with self.signals.deferring(self.display.note), shown as advance:
            while progress.step < request.steps and self.signals.requested is None:
                record = self._step()
                self.log.write(record.row())
                # The process itself shows what the host holds, the session's peaks what the others do.
                advance(1, step_text(record, {**record.peak, "host": self.growth.now()}, budgets))
                if request.save_every and progress.step % request.save_every == 0:
                    self._save()
                    saved = progress.step
            if saved != progress.step:
                self._save()

    def resume(self) -> None:
        """Goes on from the newest checkpoint, which there is.

        Raises:
            CheckpointError: it is damaged, or of another model or other data.
        """
        assert self.request.folder is not None
        extra = self.request.folder.load(self.session)
        self.batches.load_state_dict(extra["batches"])
        self.scheduler.load_state_dict(extra["scheduler"])
        self.progress.load_state_dict(extra["progress"])

    def _step(self) -> StepRecord:
        session, progress, request = self.session, self.progress, self.request
        assert session.optimizer is not None
        before = session.stats()
        started = time.perf_counter()
        scaler = session.scaler
        loss = accumulate_gradients(self.model, self.batches, request.accumulate, scale=scaler.scale)
        if request.clip is not None:
            scaler.unscale_(session.optimizer)
        # What `manage(max_grad_norm=)` does at every step, here for the norm that it gives.
        norm = None if request.clip is None else float(session.clip_grad_norm_(request.clip))
        scaler.step(session.optimizer)
        scaler.update()
        session.optimizer.zero_grad()
        seconds = time.perf_counter() - started
        tokens = request.batch_size * request.seq_len * request.accumulate

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

    def _save(self) -> None:
        if self.request.folder is not None:
            extra = {"batches": self.batches, "scheduler": self.scheduler, "progress": self.progress}
            where = self.request.folder.save(self.session, extra=extra)
            self.display.note(f"saved {where}")
