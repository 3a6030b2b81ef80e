"""`train --elastic`: a run in numbered parts, which this process supervises, or is a rank of."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import patrickstar
from patrickstar.cli.batches import as_batch, prepare_data, windows_of
from patrickstar.cli.display import Display, EventLog, step_text
from patrickstar.cli.models import check_length
from patrickstar.cli.predict import manage_arguments
from patrickstar.cli.request import Request
from patrickstar.cli.run import build_deferred, computing_device
from patrickstar.config.kinds import refuse
from patrickstar.elastic.job_directory import JobDirectory
from patrickstar.elastic.rank_process import threads_of
from patrickstar.elastic.supervisor import JobRequest, Supervisor
from patrickstar.memory.process import resident_bytes
from patrickstar.optim.hyper import build_optimizer


def supervise(sizes: str, *, save_every: int | None, directory: Path | None, words: Sequence[str]) -> int:
    """The exit status of a job whose processes are this command, with what it was given. ConfigError: no such sizes."""
    least, _, most = sizes.partition(":")
    if not (least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
        refuse([f"--elastic {sizes}: MIN:MAX is expected, such as 1:4"], of="train")
    request = JobRequest(
        command=[sys.executable, "-m", "patrickstar", "train", *words],
        least=int(least),
        most=int(most),
        size=int(least),
        warm=int(most),
        threads=threads_of(int(most)),
        save_every=save_every or 0,
    )
    return Supervisor(request, JobDirectory(directory or Path("runs") / f"elastic-{os.getpid()}")).run()


def run_parts(request: Request, parts: int) -> int:
    """Trains as a rank of an elastic job, or as one process; gives the exit status. patrickstar.Error: whatever keeps it from training."""
    display = Display(None if os.environ.get("RANK", "0") == "0" else Console(quiet=True))
    config = request.source.config()
    check_length(config, request.seq_len)
    model = build_deferred(request, display)
    data = prepare_data(
        request.data, vocab_size=config.vocab_size, own_tokenizer=request.source.tokenizer, display=display
    )
    windows, device = windows_of(data.train, request.seq_len, "training"), computing_device(request.arguments)
    optimizer = build_optimizer(model.parameters(), request.optimizer)
    session = patrickstar.manage(model, optimizer, **manage_arguments(request.arguments), max_grad_norm=request.clip)
    assert session.optimizer is not None
    bases = [float(group["lr"]) for group in optimizer.param_groups]
    steps = session.steps(
        windows,
        request.batch_size,
        parts,
        total=request.steps,
        seed=request.seed,
        collate_fn=lambda rows: as_batch(torch.stack(rows), device),
    )
    with EventLog(request.log_json, append=True) as log, display.progress("step", request.steps) as advance:
        for step in steps:
            with step:
                for group, base in zip(session.optimizer.param_groups, bases, strict=True):
                    group["lr"] = request.rates.lr(step.step, base)
                began, losses = time.perf_counter(), []
                for batch in step:
                    loss = model(**batch).loss
                    session.scaler.scale(loss).backward()
                    losses.append(float(loss.item()))
                session.scaler.step(session.optimizer)
                session.scaler.update()
                session.optimizer.zero_grad()
                seconds = time.perf_counter() - began
                tokens = request.batch_size * request.seq_len / seconds
                row: dict[str, Any] = {"event": "step", "step": step.step + 1, "ranks": session.world_size}
                row |= {"loss": sum(losses) / len(losses)}  # of this rank's parts
                row |= {"seconds": seconds, "tokens_per_second": tokens, "rss": resident_bytes()}
                if session.rank == 0:
                    log.write(row)
                advance(1, f"{step_text(row, {}, {})}  {session.world_size} ranks")
    session.close(keep_weights=False)
    return 0
