"""The training loop: an ordinary PyTorch loop on a session, with a row for every step; and the losses of a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

import patrickstar
from patrickstar.cli.batches import Batch, Batches
from patrickstar.cli.display import Budgets, Display, EventLog, Row, step_text
from patrickstar.cli.predict import manage_arguments
from patrickstar.cli.request import Request
from patrickstar.cli.stop import StopSignals
from patrickstar.cli.world import World
from patrickstar.deferred.deferred_init import present_and_absent_bytes
from patrickstar.memory.allocator import release_free_memory
from patrickstar.memory.process import peak_resident_bytes, reset_peak, resident_bytes
from patrickstar.optim.hyper import Scheduler, build_optimizer


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


# Of a run, what it must know of its beginning when it goes on in another process.
LOSSES: Final = ("first_loss", "last_loss", "first_validation_loss")
_REMEMBERED: Final = ("step", *LOSSES)


class ResidentGrowth:
    """Growth of this process while it trains, which `host_memory` promises to bound: its size above the one that is counted from.

    That is its size when `manage` is called, which follows, less the weights that are in memory and that the session takes over.
    """

    def __init__(self, model: nn.Module) -> None:
        present, _ = present_and_absent_bytes(model.parameters())
        reset_peak()
        self._base = resident_bytes() - present

    def now(self) -> int:
        """Bytes that the process has grown by now."""
        return max(0, resident_bytes() - self._base)

    def peak(self) -> int:
        """Bytes that the process has grown by at most."""
        return max(0, peak_resident_bytes() - self._base)


@dataclass(eq=False)
class TrainingRun:
    """A session, and all that a run works on. `stopped`: the exit status that a signal has asked for, once all ranks have agreed to stop."""

    request: Request
    model: nn.Module
    batches: Batches
    log: EventLog
    display: Display
    signals: StopSignals
    world: World
    stopped: int | None = None

    def __post_init__(self) -> None:
        model, request = self.model, self.request
        self.progress = Progress()
        optimizer = build_optimizer(model.parameters(), request.optimizer)
        # What the text has left with the allocator would otherwise count as there before, and hide growth.
        release_free_memory()
        self.growth = ResidentGrowth(model)
        mesh = request.together.mesh
        self.session = patrickstar.manage(model, optimizer, mesh=mesh, **manage_arguments(request.arguments))
        assert self.session.optimizer is not None
        self.scheduler = Scheduler(self.session.optimizer, request.rates)

    def run(self, *, budgets: Budgets) -> None:
        """Steps to the end, or until a signal asks to stop; saves what was promised either way."""
        progress, request = self.progress, self.request
        saved = progress.step
        shown = self.display.progress("step", request.steps, done=progress.step)
        with self.signals.deferring(self.display.note), shown as advance:
            while progress.step < request.steps and not self._is_to_stop():
                row = self._step()
                self.log.write(row)
                # The process itself shows what the host holds, the session's peaks what the others do.
                advance(1, step_text(row, {**row["peak"], "host": self.growth.now()}, budgets))
                if request.save_every and progress.step % request.save_every == 0:
                    self._save()
                    saved = progress.step
            if saved != progress.step:
                self._save()
            self._is_to_stop()

    def resume(self) -> None:
        """Goes on from the newest checkpoint, which there is. CheckpointError: it is damaged, or of another model or other data."""
        assert self.request.checkpoint_dir is not None
        extra = self.session.load_checkpoint(self.request.checkpoint_dir)
        self.batches.load_state_dict(extra["batches"])
        self.scheduler.load_state_dict(extra["scheduler"])
        for name in _REMEMBERED:
            setattr(self.progress, name, extra["progress"][name])

    def _is_to_stop(self) -> bool:
        """Tells whether a signal has asked for that, on any rank: one gets it a step before another."""
        asked = self.world.agree(self.signals.requested, "whether to go on")
        self.stopped = next((status for status in asked if status is not None), None)
        return self.stopped is not None

    def _step(self) -> Row:
        session, progress, request = self.session, self.progress, self.request
        assert session.optimizer is not None
        before = session.stats()
        started = time.perf_counter()
        scaler = session.scaler
        times = request.accumulate
        losses = [backward(self.model, self.batches, times, scale=scaler.scale) for _ in range(times)]
        loss = self.world.mean(sum(losses) / times, "the loss")
        if request.clip is not None:
            scaler.unscale_(session.optimizer)
        # What `manage(max_grad_norm=)` does at every step, here for the norm that it gives.
        norm = None if request.clip is None else float(session.clip_grad_norm_(request.clip))
        scaler.step(session.optimizer)
        scaler.update()
        session.optimizer.zero_grad()
        seconds = time.perf_counter() - started
        tokens = request.batch_size * request.seq_len * times

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
        row: dict[str, Any] = {"event": "step", "step": progress.step, "loss": loss}
        row["loss_hex"] = loss.hex()  # every bit, and `nan` and `inf`, for which JSON has no number
        row |= {"seconds": seconds, "tokens_per_second": tokens / seconds, "grad_norm": norm}
        return row | {"peak": dict(stats.peak), "sent": dict(stats.sent), "rss": resident_bytes()}

    def _save(self) -> None:
        directory = self.request.checkpoint_dir
        if directory is not None:
            directory.parent.mkdir(parents=True, exist_ok=True)
            place = {name: getattr(self.progress, name) for name in _REMEMBERED}
            extra = {"batches": self.batches, "scheduler": self.scheduler, "progress": place}
            where = self.session.save_checkpoint(directory, extra=extra, keep=self.request.keep)
            self.display.note(f"saved {where}")


def backward(
    model: nn.Module, batches: Batches, accumulate: int, *, scale: Callable[[torch.Tensor], torch.Tensor]
) -> float:
    """Forward and backward of one of a step's micro-batches, of its scaled loss; gives the one that is not.

    Every micro-batch has the same number of tokens, so `loss / accumulate` is what one large batch would have given.
    """
    loss = model(**batches.next()).loss
    scale(loss if accumulate == 1 else loss / accumulate).backward()
    return float(loss.item())


def validation_loss(model: nn.Module, batches: Sequence[Batch], *, advance: Callable[[int], None]) -> float:
    """The mean loss over held-out batches, without gradients and without dropout."""
    training = model.training
    model.eval()
    total = 0.0
    try:
        with torch.no_grad():
            for batch in batches:
                total += model(**batch).loss.item()
                advance(1)
    finally:
        model.train(training)
    return total / len(batches)
