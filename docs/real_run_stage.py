"""One of the runs of `make_real_run.py`, in a process of its own: training with a look at held-out text now and then.

    python docs/real_run_stage.py WORK NAME [--minutes N]

`WORK/course.json` says what is trained. `WORK/NAME/` has a log with a row for every step and look, checkpoints, and at the end `end.json`. A
run that is out of time, or killed, goes on from its newest checkpoint. Exit status 0: done; 75: out of time, to be called again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch
from torch.optim.lr_scheduler import LambdaLR

import patrickstar
from patrickstar.cli.batches import Batch, Batches, prepare_data
from patrickstar.cli.display import Display
from patrickstar.cli.loop import ResidentGrowth
from patrickstar.cli.models import ModelSource
from patrickstar.cli.plain import digests
from patrickstar.cli.request import BETAS, EPS, WEIGHT_DECAY, WarmupSchedule
from patrickstar.memory.allocator import release_free_memory
from patrickstar.memory.process import reset_peak

# Note [First calls]: two threads that call one of MKL's vector functions (tanh, erf) at once for the first time in a process may run two versions
# of it, and half of that one result has other last bits: in plain PyTorch, in about one process of forty with two threads. So every process takes
# a look that nobody reads before it does anything that counts.

UNFINISHED: Final = 75
HELD_OUT_BATCHES: Final = 16
WARMUP: Final = 100  # or a tenth of the steps: the default of `patrickstar train`
KEPT_CHECKPOINTS: Final = 2
TOLD_EVERY_S: Final = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class Course:
    """What all runs do alike. It must not change from one call to the next, or a run would go on with other batches."""

    settings: Mapping[str, Any]
    """The Hugging Face configuration of the model."""
    data: Sequence[str]
    """As `--data` of `patrickstar train`."""
    steps: int
    batch_size: int
    seq_len: int
    lr: float
    seed: int
    look_every: int
    save_every: int

    def factor(self, step: int) -> float:
        """On the learning rate, as the verb `train` has it."""
        return WarmupSchedule("cosine", min(WARMUP, self.steps // 10), self.steps).factor(step)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What one run does in its own way."""

    precision: str | None
    """None: plain PyTorch, without the library."""
    share: float | None = None
    """Of the model data, what the process may hold in memory; the rest is on disk. None: everything fits."""


RUNS: Final[Mapping[str, Run]] = MappingProxyType(
    {
        "plain": Run(None),
        "fp32": Run("fp32", share=0.5),
        "bf16": Run("bf16"),
        "fp16": Run("fp16"),
    }
)


class Side(Protocol):
    """Plain PyTorch, or the library."""

    def step(self, batch: Batch) -> float:
        """One step; gives its loss."""
        ...

    def save(self, place: Mapping[str, Any]) -> None: ...
    def load(self) -> Mapping[str, Any] | None:
        """The newest place that was saved, taken up; None where there is none."""
        ...

    def state_dict(self) -> Mapping[str, torch.Tensor]: ...
    def grew_bytes(self) -> int:
        """The most by which this process has grown."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the end says of it."""
        ...

    def close(self) -> None: ...


class PlainSide:
    """PyTorch alone: its model, its fused AdamW, its scheduler."""

    def __init__(self, model: Any, course: Course, home: Path) -> None:
        self._model = model
        self._file = home / "checkpoint.pt"
        self._growth = ResidentGrowth(model)
        self._optimizer = adamw(model, course, fused=True)
        self._scheduler = LambdaLR(self._optimizer, course.factor)

    def step(self, batch: Batch) -> float:
        loss = self._model(**batch).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._scheduler.step()
        return float(loss.item())

    def save(self, place: Mapping[str, Any]) -> None:
        parts = (self._model, self._optimizer, self._scheduler)
        aside = self._file.with_suffix(".new")
        torch.save({"place": dict(place), "parts": [part.state_dict() for part in parts]}, aside)
        aside.replace(self._file)

    def load(self) -> Mapping[str, Any] | None:
        if not self._file.exists():
            return None
        saved = torch.load(self._file)
        for part, state in zip((self._model, self._optimizer, self._scheduler), saved["parts"], strict=True):
            part.load_state_dict(state)
        return dict(saved["place"])

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return dict(self._model.state_dict())

    def grew_bytes(self) -> int:
        return self._growth.peak()

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Holds nothing that must be given back."""


class ManagedSide:
    """The same loop on a session."""

    def __init__(self, model: Any, course: Course, home: Path, run: Run) -> None:
        self._model = model
        self._home = home
        self._budget = None
        limits = {}
        if run.share is not None:
            self._budget = int(16 * run.share * sum(parameter.numel() for parameter in model.parameters()))
            limits = {"host_memory": self._budget, "disk": home / "disk"}
        self._growth = ResidentGrowth(model)
        self._session = patrickstar.manage(model, adamw(model, course), device="cpu", precision=run.precision, **limits)
        reset_peak()  # the weights that were there before are the session's now
        self._optimizer = self._session.optimizer
        self._scheduler = LambdaLR(self._optimizer, course.factor)
        self._bytes_per_parameter = 0.0

    def step(self, batch: Batch) -> float:
        scaler = self._session.scaler
        loss = self._model(**batch).loss
        scaler.scale(loss).backward()  # but in fp16, the scaler does no more than the plain calls
        stats = self._session.stats()
        self._bytes_per_parameter = max(self._bytes_per_parameter, stats.bytes_per_parameter)  # with gradients
        scaler.step(self._optimizer)
        scaler.update()
        self._optimizer.zero_grad()
        if self._session.stats().steps > stats.steps:  # in fp16 a step may be skipped
            self._scheduler.step()
        return float(loss.item())

    def save(self, place: Mapping[str, Any]) -> None:
        extra = {"place": dict(place), "scheduler": self._scheduler}
        self._session.save_checkpoint(self._home / "checkpoints", extra=extra, keep=KEPT_CHECKPOINTS)

    def load(self) -> Mapping[str, Any] | None:
        if not (self._home / "checkpoints" / "latest").exists():
            return None
        extra = self._session.load_checkpoint(self._home / "checkpoints")
        self._scheduler.load_state_dict(extra["scheduler"])
        return dict(extra["place"])

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return self._session.state_dict()

    def grew_bytes(self) -> int:
        return self._growth.peak()

    def facts(self) -> dict[str, Any]:
        scaled = {"loss_scale": self._session.scaler.get_scale()} if self._session.scaler.is_enabled() else {}
        return {
            "budget_bytes": self._budget,
            "bytes_per_parameter": self._bytes_per_parameter,
            "updates": self._scheduler.last_epoch,
            **scaled,
        }

    def close(self) -> None:
        self._session.close(keep_weights=False)


def adamw(model: Any, course: Course, **how: Any) -> torch.optim.AdamW:
    """The optimizer of the verb `train`."""
    return torch.optim.AdamW(model.parameters(), lr=course.lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **how)


def train(run: Run, course: Course, home: Path, *, seconds: float) -> bool:
    """Goes on with a run until its end (True) or until the time is up."""
    until = time.monotonic() + seconds
    source = ModelSource("real run", course.settings)
    vocab_size = source.config().vocab_size
    data = prepare_data(course.data, vocab_size=vocab_size, own_tokenizer=None, display=Display())
    batches = Batches(data.train, batch_size=course.batch_size, seq_len=course.seq_len, seed=course.seed)
    held_out = batches.held_out(data.held_out, most=HELD_OUT_BATCHES)
    torch.manual_seed(course.seed)
    model = source.build()
    look(model, held_out[:1])  # see Note [First calls]
    about = {
        "corpus": data.source,
        "tokenizer": data.tokenizer,
        "train_tokens": len(data.train),
        "validation_tokens": len(data.held_out),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    release_free_memory()  # what the text has left would count as there before
    side: Side = PlainSide(model, course, home) if run.precision is None else ManagedSide(model, course, home, run)
    try:
        texts = {"batches": batches, "held_out": held_out}
        if not follow(side, model, course=course, **texts, file=home / "log.jsonl", until=until):
            return False
        end = {**about, **side.facts(), "digests": digests(side.state_dict())}
        (home / "end.json").write_text(json.dumps(end, indent=1) + "\n")
    finally:
        side.close()
    return True


def follow(
    side: Side, model: Any, *, course: Course, batches: Batches, held_out: Sequence[Batch], file: Path, until: float
) -> bool:
    """The steps that are left, with a row for each and a look now and then; False where the time was up before the end."""
    step, log = begin(side, batches, file)
    if step == 0:
        log.write({"event": "look", "step": 0, **look(model, held_out)})
    told = 0.0
    while step < course.steps:
        started = time.perf_counter()
        loss = side.step(batches.next())
        seconds = time.perf_counter() - started
        step += 1
        log.write({"event": "step", "step": step, "loss": loss, "seconds": seconds, "grew_bytes": side.grew_bytes()})
        last = step == course.steps or time.monotonic() > until
        if step % course.look_every == 0 or step == course.steps:
            log.write({"event": "look", "step": step, **look(model, held_out)})
        if step % course.save_every == 0 or last:
            side.save({"step": step, "batches": batches.state_dict()})
        if time.monotonic() - told > TOLD_EVERY_S or last:
            told = time.monotonic()
            sys.stdout.write(f"step {step} of {course.steps}, loss {loss:.4f}\n")
            sys.stdout.flush()
        if last:
            break
    return step == course.steps


def begin(side: Side, batches: Batches, file: Path) -> tuple[int, Log]:
    """The step to go on from, and the log up to there."""
    place = side.load()
    if place is None:
        return 0, Log(file, ())
    batches.load_state_dict(place["batches"])
    rows = [row for row in read_log(file) if row["step"] <= place["step"]]
    return place["step"], Log(file, rows)


def look(model: Any, batches: Sequence[Batch]) -> dict[str, float]:
    """Mean loss, and the share of tokens that are the likeliest ones, on held-out text."""
    model.eval()
    loss, right, tokens = 0.0, 0, 0
    with torch.no_grad():
        for batch in batches:
            output = model(**batch)
            guessed, said = output.logits[:, :-1].argmax(-1), batch["labels"][:, 1:]
            loss += output.loss.item()
            right += int((guessed == said).sum())
            tokens += said.numel()
    model.train()
    return {"loss": loss / len(batches), "accuracy": right / tokens}


class Log:
    """Rows of a file, each written out before the run goes on."""

    def __init__(self, file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        aside = file.with_suffix(".new")
        aside.write_text("".join(json.dumps(row) + "\n" for row in rows))
        aside.replace(file)
        self._file = file

    def write(self, row: Mapping[str, Any]) -> None:
        with self._file.open("a") as out:
            out.write(json.dumps(row) + "\n")


def read_log(file: Path) -> Iterator[dict[str, Any]]:
    """Its rows; a last line that a killed process has left half written is none."""
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("name", choices=RUNS)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    arguments = parser.parse_args()
    course = Course(**json.loads((arguments.work / "course.json").read_text()))
    home = arguments.work / arguments.name
    home.mkdir(exist_ok=True)
    return 0 if train(RUNS[arguments.name], course, home, seconds=60 * arguments.minutes) else UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
